"""Golden files: prompts, and the tokens and logits that the specification gives for them.

A bundle ``NAME.kdtr`` has its golden file ``NAME.golden.safetensors`` beside it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from kdtree_nb.config import ModelConfig
from kdtree_nb.reference.model import greedy

SUFFIX = ".golden.safetensors"
NEW_TOKENS = 24
NARROWEST_MARGIN = 2e-3
"""The best logit must lead the second by this much, so that rounding on another machine can't change a token."""


class GoldenCase(NamedTuple):
    """A prompt int32 [n], its greedy ``tokens`` int32 [m], and the ``logits`` float32 [m, vocab] that chose them."""

    prompt: np.ndarray
    tokens: np.ndarray
    logits: np.ndarray

    @property
    def text(self) -> np.ndarray:
        """Prompt and continuation, int32 [n + m]."""
        return np.concatenate([self.prompt, self.tokens])


def folder() -> Path:
    """``golden/`` of the checkout this package is imported from.

    Raises
    ------
    FileNotFoundError
        If the package was installed without its repository.
    """
    found = Path(__file__).resolve().parent.parent / "golden"
    if not found.is_dir():
        raise FileNotFoundError(f"{found} is missing: the golden files are part of the repository, run from a checkout")
    return found


def golden_files(root: Path) -> list[Path]:
    """All golden files below a folder, tiny models first.

    Raises
    ------
    OSError
        If it is no folder.
    """
    if not root.is_dir():
        raise NotADirectoryError(f"{root}: {'a file' if root.exists() else 'no such folder'}, expected a folder")
    return sorted(root.rglob(f"*{SUFFIX}"), key=lambda path: (path.parent.name != "tiny", path))


def bundle_of(golden: Path) -> Path:
    """The bundle that a golden file is about."""
    return golden.with_name(golden.name.removesuffix(SUFFIX) + ".kdtr")


def held_out_prompts(model_folder: Path) -> dict[str, list[str]]:
    """Texts that a trained model has not seen, by domain: the ``prompts.json`` beside its bundle."""
    by_domain: dict[str, list[str]] = {}
    for prompt in json.loads((model_folder / "prompts.json").read_text(encoding="utf-8")):
        by_domain.setdefault(prompt["domain"], []).append(prompt["text"])
    return by_domain


def make_cases(
    weights: Mapping[str, np.ndarray], config: ModelConfig, prompts: Sequence[np.ndarray], count: int
) -> list[GoldenCase]:
    """The first ``count`` prompts whose greedy text keeps the margin and goes on; made by the reference alone.

    Raises
    ------
    ValueError
        If too few prompts do.
    """
    cases: list[GoldenCase] = []
    for prompt in prompts:
        tokens, logits = greedy(weights, config, prompt, NEW_TOKENS)
        second, best = np.sort(logits, axis=1)[:, -2:].T
        ends_early = np.isin(tokens[:-1], config.eos_token_ids).any()  # the engine would stop there
        if (best - second).min() >= NARROWEST_MARGIN and not ends_early:
            cases.append(GoldenCase(np.asarray(prompt, np.int32), tokens, logits))
        if len(cases) == count:
            return cases
    raise ValueError(f"golden: {len(cases)} of {len(prompts)} prompts keep the margin, expected {count}")


def save_cases(path: Path, cases: Sequence[GoldenCase]) -> None:
    """Write a golden file."""
    tensors = {f"{i}.{name}": array for i, case in enumerate(cases) for name, array in case._asdict().items()}
    save_file(tensors, path, metadata={"format": "kdtr-golden"})


def load_cases(path: Path) -> list[GoldenCase]:
    """Read a golden file.

    Raises
    ------
    ValueError
        If it is not one.
    """
    try:
        tensors = load_file(path)
        count = max(1, len(tensors) // len(GoldenCase._fields))
        cases = [GoldenCase(*(tensors[f"{i}.{name}"] for name in GoldenCase._fields)) for i in range(count)]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is not a golden file: {error}") from error
    for i, case in enumerate(cases):
        if case.logits.ndim != 2 or not len(case.logits) == case.tokens.size > 0:
            raise ValueError(
                f"{path} is not a golden file: case {i} has tokens {list(case.tokens.shape)} "
                f"and logits {list(case.logits.shape)}, expected [m] and [m, vocab]"
            )
    return cases
