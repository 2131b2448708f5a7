"""Hugging Face folders in and out: ``convert`` makes a bundle of one, ``export`` one of a bundle."""

from kdtree_nb.checkpoint.conversion import convert
from kdtree_nb.checkpoint.exporting import export
from kdtree_nb.checkpoint.folder import open_folder
from kdtree_nb.checkpoint.layout import Checkpoint, read_checkpoint

__all__ = ["Checkpoint", "convert", "export", "open_folder", "read_checkpoint"]
