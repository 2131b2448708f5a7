"""The main job in one command: verify, generate with every decoder, compare, draw."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kdtree_nb import plotting
from kdtree_nb.engine import Engine, Generation
from kdtree_nb.engine.decode import DECODERS
from kdtree_nb.golden import SUFFIX, held_out_prompts, load_cases
from kdtree_nb.verify import LOGIT_TOLERANCE, logit_differences

NEW_TOKENS = 64


class Comparison(NamedTuple):
    """One prompt, continued by every decoder."""

    domain: str
    prompt: str
    runs: dict[str, Generation]

    @property
    def agree(self) -> bool:
        """Every decoder gave the same tokens."""
        return len({tuple(run.tokens) for run in self.runs.values()}) == 1


def check_figure(path: Path) -> None:
    """Refuse a name that :func:`draw` could not save under.

    Raises
    ------
    ValueError
        For an ending that is none of Matplotlib's formats.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(f"demo: --figure {path}, expected a name that ends in one of .{', .'.join(formats)}")


def trained_bundle(golden: Path) -> Path:
    """The trained INT4 model of the repository."""
    return golden / "kdt16m" / "kdt16m-int4.kdtr"


def compare(engine: Engine, golden: Path) -> Iterator[Comparison]:
    """Continue the first held-out prompt of each domain with every decoder."""
    for domain, (text, *_) in held_out_prompts(golden / "kdt16m").items():
        engine.generate(text, max_new_tokens=NEW_TOKENS)  # loads the experts that this text needs
        runs = {decoder: engine.generate(text, decoder, max_new_tokens=NEW_TOKENS) for decoder in DECODERS}
        yield Comparison(domain, text, runs)


def draw(engine: Engine, golden: Path, comparisons: list[Comparison], path: Path) -> None:
    """Save the demo's figure: how far the engine is from the specification, and what each round committed."""
    from matplotlib.figure import Figure

    cases = load_cases(golden / "kdt16m" / f"kdt16m-int4{SUFFIX}")
    differences = {}
    for comparison, case in zip(comparisons, cases, strict=False):
        generation = engine.generate(case.prompt, "ar", max_new_tokens=len(case.tokens), keep_logits=True)
        differences[comparison.domain] = logit_differences(case, generation)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    plotting.logit_differences(left, differences).set(ylim=(1e-7, 2 * LOGIT_TOLERANCE), xlim=(0.5, None))
    left.axhline(LOGIT_TOLERANCE, color=plotting.QUIET, ls="--")
    left.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0.9), frameon=False)
    left.set_title("engine against the NumPy specification (dashed: tolerance)", fontsize="medium")
    accepted = {c.domain: [r.accepted for r in c.runs["ddtree"].rounds] for c in comparisons}
    plotting.rounds(right, accepted).set_title("ddtree: the text cut into its rounds", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
