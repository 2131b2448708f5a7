"""``python -m kdtree_nb``."""

from kdtree_nb.cli import main

if __name__ == "__main__":
    main()
