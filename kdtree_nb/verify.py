"""The golden checks: the engine against what the specification gave."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kdtree_nb.bundle import BundleError
from kdtree_nb.engine import Engine, Generation, Oracle
from kdtree_nb.golden import GoldenCase, bundle_of, golden_files, load_cases

LOGIT_TOLERANCE = 1e-3
NODE_BUDGET = 16


class Check(NamedTuple):
    """One line of the report."""

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{'PASS' if self.passed else 'FAIL'}  {self.name:<12}  {self.detail}"


def verify(root: Path, device: str = "auto") -> Iterator[tuple[Path, Check]]:
    """Check every bundle that has a golden file below a folder.

    Yields
    ------
    The bundle's path and a check, as each is done.

    Raises
    ------
    FileNotFoundError
        If there is no golden file.
    """
    golden = golden_files(root)
    if not golden:
        raise FileNotFoundError(f"no golden file below {root}: `make golden` writes them")
    for path in golden:
        for check in verify_bundle(bundle_of(path), load_cases(path), device):
            yield bundle_of(path), check


def verify_bundle(path: Path, cases: list[GoldenCase], device: str = "auto") -> Iterator[Check]:
    """A bundle's checksums, then each decoder against the golden tokens and logits."""
    try:
        engine = Engine.load(path, device)
        engine.bundle.verify()
    except BundleError as error:
        yield Check("bundle", False, str(error))
        return
    yield Check("bundle", True, f"{len(engine.bundle)} tensors match their checksums")

    plain = [engine.generate(case.prompt, "ar", max_new_tokens=len(case.tokens), keep_logits=True) for case in cases]
    yield check_ar(cases, plain)
    for decoder in ("chain", "ddtree"):
        drafted = [
            engine.generate(
                case.prompt,
                decoder,
                NODE_BUDGET,
                len(case.tokens),
                drafter=Oracle(case.text, engine.config.vocab_size),
                keep_logits=True,
            )
            for case in cases
        ]
        yield check_speculation(decoder, cases, plain, drafted)


def check_ar(cases: list[GoldenCase], plain: list[Generation]) -> Check:
    """Plain decoding: golden tokens, and logits within the tolerance. Of several prompts, the worst is shown."""
    pairs = list(zip(cases, plain, strict=True))
    equal, length = min(((_equal_tokens(*pair), len(pair[0].tokens)) for pair in pairs), key=lambda n: n[0] - n[1])
    difference = np.max([logit_differences(*pair).max(initial=0.0) for pair in pairs])  # NaN, if one is
    exact = equal == length
    detail = f"tokens={equal}/{length} {'exact' if exact else 'DIFFER'}  max_abs_logit_diff={difference:.1e}"
    return Check("model_ar", exact and bool(difference <= LOGIT_TOLERANCE), f"{detail}  prompts={len(cases)}")


def check_speculation(
    decoder: str, cases: list[GoldenCase], plain: list[Generation], drafted: list[Generation]
) -> Check:
    """A speculative decoder: golden tokens, and the very bits of plain decoding's logits."""
    length = len(cases[0].tokens)
    shortened = max(generation.target_forwards for generation in drafted) < length
    claims: dict[str, Callable[[GoldenCase, Generation, Generation], bool]] = {
        "AR==golden": lambda case, ar, _: case.tokens.tolist() == ar.tokens,
        f"{decoder.upper()}==golden": lambda case, _, own: case.tokens.tolist() == own.tokens,
        "greedy-exact": lambda _, ar, own: np.array_equal(ar.logits, own.logits),  # type: ignore[arg-type]
    }
    failed = [name for name, holds in claims.items() if not all(map(holds, cases, plain, drafted))]
    failed += [] if shortened else ["fewer target forwards than tokens"]
    forwards = max(generation.target_forwards for generation in drafted)
    if failed:
        return Check(f"model_{decoder}", False, f"does not hold: {', '.join(failed)}")
    ar, own, exact = claims
    detail = f"{ar} and {own} ({length} tokens), {exact}, target_forwards={forwards}"
    return Check(f"model_{decoder}", True, f"{detail}  drafter=oracle prompts={len(cases)}")


def logit_differences(case: GoldenCase, generation: Generation) -> np.ndarray:
    """Largest |engine − specification| of each token's logits: float32 [tokens], of those both have."""
    assert generation.logits is not None
    both = min(len(case.logits), len(generation.logits))
    return np.abs(generation.logits[:both] - case.logits[:both]).max(axis=1)


def _equal_tokens(case: GoldenCase, generation: Generation) -> int:
    """Tokens that agree before the first that does not."""
    pairs = zip(case.tokens.tolist(), generation.tokens, strict=False)
    shorter = min(len(case.tokens), len(generation.tokens))
    return next((i for i, (golden, own) in enumerate(pairs) if golden != own), shorter)
