"""Train the drafter of the shipped model kdt16m: the target's own text, training, bundle.

    python golden/train/run_drafter.py                              needs a CUDA GPU (about six minutes, H200)
    python golden/train/run_drafter.py --device cpu --seconds 30    a smoke run; the drafter is good for little

Needs the extra `train`, and ``build/tokens.npz``, which run.py makes in its first two steps (corpus, tokenize).
"""

import argparse
import dataclasses
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # kdtree_nb, also when it is not installed

import export  # noqa: E402
import train_drafter  # noqa: E402
from recipe import DrafterRecipe  # noqa: E402

from kdtree_nb.bundle import Bundle  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where training runs (default: cuda)")
    parser.add_argument(
        "--seconds", type=float, help="train this long, on a CPU with few texts and small batches; for smoke runs"
    )
    parser.add_argument("--folder", type=Path, default=HERE / "build", help="intermediate files (default: build/ here)")
    parser.add_argument("--out", type=Path, help="the drafter's place (golden/kdt16m; with --seconds FOLDER/kdt16m)")
    arguments = parser.parse_args()

    recipe, model = DrafterRecipe(), HERE.parent / "kdt16m"
    out = arguments.out or (arguments.folder / "kdt16m" if arguments.seconds else model)
    if arguments.seconds:
        small = (
            {"texts": 64, "generation_batch": 16, "batch_size": 2, "anchors": 8} if arguments.device == "cpu" else {}
        )
        recipe = dataclasses.replace(recipe, seconds=arguments.seconds, **small)
    bundle = Bundle.open(model / export.BUNDLE)
    tensors = {name: export.to_torch(bundle[name]) for name in bundle}
    train_drafter.build(arguments.folder, tensors, recipe, arguments.device)
    export.build_drafter(arguments.folder, out)
    print(f"the drafter is in {out}")


if __name__ == "__main__":
    main()
