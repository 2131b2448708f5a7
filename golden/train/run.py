"""Make the trained model kdt16m from nothing: corpus, tokenizer, training, evaluation, bundle.

    python golden/train/run.py                            all of it; training needs a CUDA GPU (about six minutes, H200)
    python golden/train/run.py --device cpu --steps 20    a smoke run without one; the model is good for nothing

Needs the extra `train` (pip install -e .[train]), and apt-get for the corpus. A step whose outputs exist is skipped, so
a run goes on where the last one stopped; --from STEP does that step and all after it again. Another corpus hash than
the committed one means that a package is served in a newer version: the scores will then differ a little.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # kdtree_nb, also when it is not installed

import baselines  # noqa: E402
import corpus  # noqa: E402
import export  # noqa: E402
import samples  # noqa: E402
import tokenize_corpus  # noqa: E402
import train  # noqa: E402
from recipe import Recipe  # noqa: E402

STEPS = ("corpus", "tokenize", "train", "baselines", "samples", "export")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where training runs (default: cuda)")
    parser.add_argument("--steps", type=int, help="train this many steps, small batches on a CPU; for smoke runs")
    parser.add_argument("--folder", type=Path, default=HERE / "build", help="intermediate files (default: build/ here)")
    parser.add_argument("--out", type=Path, help="the model's place (golden/kdt16m; with --steps FOLDER/kdt16m)")
    parser.add_argument("--from", dest="first", choices=STEPS, help="do this step and all after it again")
    arguments = parser.parse_args()

    folder, recipe = arguments.folder, Recipe()
    out = arguments.out or (folder / "kdt16m" if arguments.steps else HERE.parent / "kdt16m")
    if arguments.steps:
        small = {"batch_size": 2} if arguments.device == "cpu" else {}
        recipe = dataclasses.replace(recipe, steps=arguments.steps, warmup_steps=arguments.steps // 5, **small)
    steps: dict[str, tuple[list[str], Callable[[], None]]] = {
        "corpus": (["train.jsonl", "heldout.jsonl", "manifest.json"], lambda: corpus.build(folder)),
        "tokenize": (["tokenizer.json", "tokens.npz"], lambda: tokenize_corpus.build(folder)),
        "train": (
            ["weights.safetensors", "training.json"],
            lambda: train.build(folder, recipe, arguments.device, bool(arguments.steps)),
        ),
        "baselines": (["baselines.json"], lambda: baselines.build(folder)),
        "samples": (["prompts.json", "heldout"], lambda: samples.build(folder)),
        "export": ([], lambda: export.build(folder, out)),
    }
    again = False
    for name, (outputs, build) in steps.items():
        again = again or name == arguments.first
        if outputs and not again and all((folder / output).exists() for output in outputs):
            print(f"{name}: there already")
            continue
        print(f"{name} …", flush=True)
        started = time.time()
        build()
        print(f"{name}: done in {time.time() - started:.0f} s", flush=True)
    print(f"the model is in {out}")


if __name__ == "__main__":
    main()
