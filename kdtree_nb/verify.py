"""The golden checks: the engine against what the specification gave."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kdtree_nb.bundle import BundleError
from kdtree_nb.engine import DFlash, Drafter, Engine, Generation, Oracle, Proposal
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.decode import DECODERS
from kdtree_nb.golden import GoldenCase, bundle_of, golden_files, held_out_prompts, load_cases
from kdtree_nb.kernels.launch import Array
from kdtree_nb.reference.drafter import draft_rows
from kdtree_nb.reference.model import forward, hidden_states
from kdtree_nb.reference.sampling import log_softmax, top_k
from kdtree_nb.reference.transition import condition

LOGIT_TOLERANCE = 1e-3
BF16_TOLERANCE, BF16_TOKENS = 1 / 8, 1 / 2
"""How near bfloat16's logits are to the specification's in float32, in deviations of these, and for how many tokens.

A rounding to bfloat16 is off by up to 2^-9, and a pass has some hundred that reach every logit: a token's largest
difference is 0.01 to 0.13 of a deviation in the golden texts. But where a router was almost undecided, an expert may
change and with it everything: up to 2.5, for 5 of 24 tokens of a random model. A fault of the arithmetic shows in all.
"""
BF16_ROUNDINGS = 3.0
"""How far the median token may be, in what one rounding of every weight moves the specification: see :func:`nudged`.

The engine rounds three things as much: both operands of a product, and the cache. At random they come to √3 together,
and are 1.1 to 2.4 in each golden text; only if all went the same way would they come to 3. It is the model's own
measure: a trained one is moved 0.01 of a deviation where a random one is 0.04, and the bound above would not show there
a softmax scale that is 3 % off.
"""
BF16_DRAFT_TOLERANCE, BF16_ROUNDS = 1 / 4, 1 / 2
"""How near bfloat16's drafts are to the specification's in float32, in nats of a candidate, and in how many rounds.

Behind both roundings, the target's of what the drafter reads and its own, a round's largest difference of all
candidates is 0.02 to 0.2 in random models; in the trained one, of more candidates, the median is 0.07, the largest 0.4.
"""
NODE_BUDGET = 16
NEW_TOKENS, EMULATED_TOKENS = 500, 24
"""Of each held-out text; the emulated device is by far the slowest."""
PROMPT_TOKENS = 12
"""Of a held-out prompt: the trained model's 512 positions leave room for 500 more."""

Progress = Callable[[str], None]


class Check(NamedTuple):
    """One line of the report."""

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{'PASS' if self.passed else 'FAIL'}  {self.name:<12}  {self.detail}"


def verify(
    root: Path,
    device: str = "auto",
    new_tokens: int | None = None,
    progress: Progress | None = None,
    dtype: str = "float32",
) -> Iterator[tuple[Path, Check]]:
    """Check every bundle that has a golden file below a folder; other arguments as :func:`verify_bundle` has them.

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
        for check in verify_bundle(bundle_of(path), load_cases(path), device, new_tokens, progress, dtype):
            yield bundle_of(path), check


def verify_bundle(
    path: Path,
    cases: list[GoldenCase],
    device: str = "auto",
    new_tokens: int | None = None,
    progress: Progress | None = None,
    dtype: str = "float32",
) -> Iterator[Check]:
    """A bundle's checksums, each decoder against the golden tokens and logits, and the trained drafter, if it has one.

    In bfloat16 the golden tokens are another arithmetic's. There plain decoding has to be near the specification's
    logits of the same text, and each decoder has to give plain decoding's tokens and bits; names end in ``_bf16``.

    Parameters
    ----------
    new_tokens : int, optional
        Of each held-out text that the trained drafter is tried on: 500 by default, 24 on the emulated device.
    progress : callable, optional
        Called with what comes next.
    dtype : {"float32", "bfloat16"}
        Of the engine.
    """
    say = progress or (lambda _: None)
    say(f"{path.name}: checksums")
    try:
        engine = Engine.load(path, device, dtype=dtype)
        engine.bundle.verify()
    except BundleError as error:
        yield Check("bundle", False, str(error))
        return
    yield Check("bundle", True, f"{len(engine.bundle)} tensors match their checksums")

    say(f"{path.name}: golden texts")
    plain = [engine.generate(case.prompt, "ar", max_new_tokens=len(case.tokens), keep_logits=True) for case in cases]
    exact = dtype == "float32"
    yield check_ar(cases, plain) if exact else check_ar_bf16(engine, cases, plain)
    texts = [case.text if exact else own_text(case, run) for case, run in zip(cases, plain, strict=True)]
    for decoder in ("chain", "ddtree"):
        drafted = [
            engine.generate(
                case.prompt,
                decoder,
                NODE_BUDGET,
                len(case.tokens),
                drafter=Oracle(text, engine.config.vocab_size),
                keep_logits=True,
            )
            for case, text in zip(cases, texts, strict=True)
        ]
        yield check_speculation(decoder, cases, plain, drafted, exact)

    if isinstance(engine.drafter, DFlash):
        say(f"{path.name}: drafter")
        yield check_drafter(engine, engine.drafter, cases)
        new_tokens = new_tokens or (EMULATED_TOKENS if engine.device.name == "emulated" else NEW_TOKENS)
        for domain, (text, *_) in held_out_prompts(engine.bundle.path.parent).items():
            yield check_trained(engine, domain, text, new_tokens, say)


def check_ar(cases: list[GoldenCase], plain: list[Generation]) -> Check:
    """Plain decoding: golden tokens, and logits within the tolerance. Of several prompts, the worst is shown."""
    pairs = list(zip(cases, plain, strict=True))
    equal, length = min(((_equal_tokens(*pair), len(pair[0].tokens)) for pair in pairs), key=lambda n: n[0] - n[1])
    difference = np.max([logit_differences(*pair).max(initial=0.0) for pair in pairs])  # NaN, if one is
    exact = equal == length
    detail = f"tokens={equal}/{length} {'exact' if exact else 'DIFFER'}  max_abs_logit_diff={difference:.1e}"
    return Check("model_ar", exact and bool(difference <= LOGIT_TOLERANCE), f"{detail}  prompts={len(cases)}")


def check_ar_bf16(engine: Engine, cases: list[GoldenCase], plain: list[Generation]) -> Check:
    """Plain decoding in bfloat16: logits near the specification's of the same text; golden tokens are only counted.

    Half of each prompt's tokens have to be within a tolerance, and the median of all within the model's own measure.
    """
    weights = engine.bundle.weights()
    moved = nudged(weights)
    largest: list[np.ndarray] = []
    rounded: list[np.ndarray] = []
    for case, run in zip(cases, plain, strict=True):
        text, first = own_text(case, run)[:-1], len(case.prompt) - 1
        specified = forward(weights, engine.config, text)[first:]
        for found, logits in ((largest, run.logits), (rounded, forward(moved, engine.config, text)[first:])):
            found.append(np.abs(logits - specified).max(axis=1) / specified.std())
    roundings = np.median(np.concatenate(largest)) / np.median(np.concatenate(rounded))
    counts = [(int((of_text <= BF16_TOLERANCE).sum()), len(of_text)) for of_text in largest]
    near = min(counts, key=lambda count: count[0] / count[1])
    equal = min(_equal_tokens(case, run) for case, run in zip(cases, plain, strict=True))
    detail = f"near={near[0]}/{near[1]} tokens within {BF16_TOLERANCE} deviations of float32's logits"
    detail += f"  largest={np.max([of_text.max() for of_text in largest]):.2f}  median={roundings:.1f} roundings"
    golden = f"golden tokens of float32: {equal}/{len(cases[0].tokens)}"
    passed = near[0] >= BF16_TOKENS * near[1] and bool(roundings <= BF16_ROUNDINGS)
    return Check("model_ar_bf16", passed, f"{detail}  {golden}  prompts={len(cases)}")


def nudged(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every weight moved at random, by as much as a rounding to bfloat16 can: up to 2^-9 of itself."""
    random, most = np.random.default_rng(0), 2.0**-9
    return {
        name: weight * (1 + random.uniform(-most, most, weight.shape)).astype(np.float32)
        for name, weight in weights.items()
    }


def check_speculation(
    decoder: str, cases: list[GoldenCase], plain: list[Generation], drafted: list[Generation], exact: bool = True
) -> Check:
    """A speculative decoder: golden tokens, where arithmetic is exact, and the very bits of plain decoding's logits."""
    name = f"model_{decoder}" if exact else f"model_{decoder}_bf16"
    length = len(cases[0].tokens)
    shortened = max(generation.target_forwards for generation in drafted) < length
    claims: dict[str, Callable[[GoldenCase, Generation, Generation], bool]] = {
        "AR==golden": lambda case, ar, _: case.tokens.tolist() == ar.tokens,
        f"{decoder.upper()}==golden": lambda case, _, own: case.tokens.tolist() == own.tokens,
    }
    if not exact:
        claims = {f"AR=={decoder.upper()}": lambda _, ar, own: ar.tokens == own.tokens}
    claims["greedy-exact"] = lambda _, ar, own: np.array_equal(ar.logits, own.logits)  # type: ignore[arg-type]
    failed = [name for name, holds in claims.items() if not all(map(holds, cases, plain, drafted))]
    failed += [] if shortened else ["fewer target forwards than tokens"]
    forwards = max(generation.target_forwards for generation in drafted)
    if failed:
        return Check(name, False, f"does not hold: {', '.join(failed)}")
    *same, bits = claims
    detail = f"{' and '.join(same)} ({length} tokens), {bits}, target_forwards={forwards}"
    return Check(name, True, f"{detail}  drafter=oracle prompts={len(cases)}")


def check_drafter(engine: Engine, drafter: DFlash, cases: list[GoldenCase]) -> Check:
    """The trained drafter's checksums, and its proposals in each round of the golden texts against its specification.

    The engine keeps a cache from round to round; the specification starts anew each time, from the target's own, in
    float32. Of an engine in bfloat16 half of the rounds have to be near it, and to have the same best tokens.
    """
    exact = engine.dtype == "float32"
    name = "drafter" if exact else "drafter_bf16"
    try:
        drafter.bundle.verify()
    except BundleError as error:
        return Check(name, False, str(error))
    target, weights, config = engine.bundle.weights(), drafter.bundle.weights(), drafter.config
    embedding = target["model.embed_tokens"]
    head = embedding if engine.config.tie_word_embeddings else target["lm_head"]
    differences: list[float] = []
    equal: list[bool] = []
    repeated = 0
    for case in cases:
        watched = _Watched(drafter)
        engine.generate(case.prompt, "ddtree", NODE_BUDGET, len(case.tokens), drafter=watched)
        longest, _ = watched.proposals[-1]
        _, *outputs = hidden_states(target, engine.config, longest)
        features = np.concatenate([outputs[layer] for layer in config.target_layer_ids], axis=1)
        for committed, found in watched.proposals:
            repeated += sum(len(set(row)) < len(row) for row in found.token_ids.tolist())
            block = embedding[[committed[-1], *[config.mask_token_id] * (config.block_size - 1)]]
            rows = draft_rows(weights, config, features[: len(committed) - 1], block)
            logits = rows @ head.T
            lowest, best = top_k(logits, config.num_candidates)
            own = np.take_along_axis(log_softmax(logits), found.token_ids, axis=1)
            missed = (lowest.min(axis=1) - own.min(axis=1)).max()  # 0 where the candidates are the best
            moved = _largest_difference(found, specified(weights, rows, own, found.token_ids))
            differences.append(np.maximum(missed, moved))  # NaN, if one is
            equal.append(most_probable(found) == most_probable(specified(weights, rows, lowest, best)))
    difference, rounds = np.max(differences), len(equal)
    if exact:
        passed = all(equal) and bool(difference <= LOGIT_TOLERANCE)
        detail = f"best tokens of {sum(equal)}/{rounds} rounds {'exact' if all(equal) else 'DIFFER'}"
        detail += f"  max_abs_log_prob_diff={difference:.1e}"
    else:
        near = sum(bool(of_round <= BF16_DRAFT_TOLERANCE) for of_round in differences)
        passed = min(near, sum(equal)) >= BF16_ROUNDS * rounds
        detail = f"near={near}/{rounds} rounds within {BF16_DRAFT_TOLERANCE} nats of float32's drafts"
        detail += f"  largest={difference:.2f}  best tokens of {sum(equal)}/{rounds} rounds equal"
    detail += f"  prompts={len(cases)}"
    if repeated:
        detail = f"{repeated} positions propose a token twice  {detail}"
    return Check(name, passed and not repeated, detail)


def specified(
    weights: Mapping[str, np.ndarray], rows: np.ndarray, log_probs: np.ndarray, token_ids: np.ndarray
) -> Proposal:
    """What the drafter's specification proposes of candidates [L, K]; ``rows`` [L, hidden] are what the head reads."""
    if "transition.gate" not in weights:
        return Proposal(log_probs, token_ids)
    tables = weights["transition.parent_table"], weights["transition.child_table"]
    conditionals, children = condition(log_probs, token_ids, rows @ weights["transition.gate"].T, *tables)
    return Proposal(conditionals, token_ids, children)


def most_probable(proposal: Proposal) -> list[int]:
    """The chain that a proposal begins with: at each depth the best token, given those before it."""
    chain, candidate = [], 0
    for depth, tokens in enumerate(proposal.token_ids):
        candidate = 0 if proposal.children is None else int(proposal.children[depth, candidate, 0])
        chain.append(int(tokens[candidate]))
    return chain


def _largest_difference(one: Proposal, other: Proposal) -> float:
    """Of the log-probabilities that two proposals of the same candidates give to each."""
    both = []
    for log_probs, _, children in (one, other):
        by_candidate = np.array(log_probs)
        if children is not None:
            np.put_along_axis(by_candidate, children, log_probs, axis=2)
        both.append(by_candidate)
    unequal = both[0] != both[1]  # no difference between impossible ones
    return float(np.abs(both[0][unequal] - both[1][unequal]).max(initial=0.0))


class _Watched(Drafter):
    """A drafter that works through the host, which keeps a text's proposals with the tokens that they follow."""

    def __init__(self, drafter: DFlash) -> None:
        self._drafter, self._text, self.taps = drafter, Drafter(), drafter.taps
        self.proposals: list[tuple[np.ndarray, Proposal]] = []

    def start(self, cache: LatentCache) -> Drafter:
        self._text = self._drafter.start(cache)
        return self

    def observe(self, features: Array) -> None:
        self._text.observe(features)

    def propose(self, tokens: np.ndarray) -> Proposal:
        log_probs, token_ids, children = self._text.propose(tokens)
        host = self._drafter.device.host
        proposal = Proposal(host(log_probs), host(token_ids), None if children is None else host(children))
        self.proposals.append((tokens, proposal))
        return proposal


def check_trained(engine: Engine, domain: str, text: str, new_tokens: int, say: Progress) -> Check:
    """The trained drafter on a held-out text: every decoder gives plain decoding's tokens, and its very logits."""
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(text).ids[:PROMPT_TOKENS]
    runs = {}
    for decoder in DECODERS:
        say(f"{domain}: {new_tokens} tokens by {decoder}")
        runs[decoder] = engine.generate(prompt, decoder, NODE_BUDGET, new_tokens, keep_logits=True)
    plain, *drafted = runs.values()
    claims = {
        "AR==CHAIN==DDTREE": all(run.tokens == plain.tokens for run in drafted),
        "greedy-exact": all(np.array_equal(run.logits, plain.logits) for run in drafted),  # type: ignore[arg-type]
        "fewer target forwards than tokens": all(run.target_forwards < len(run.tokens) for run in drafted),
    }
    failed = [claim for claim, holds in claims.items() if not holds]
    name = "model_ddtree" if engine.dtype == "float32" else "model_ddtree_bf16"
    if failed:
        return Check(name, False, f"does not hold: {', '.join(failed)}  drafter=trained domain={domain}")
    same, exact, _ = claims
    forwards = ", ".join(f"{decoder} {runs[decoder].target_forwards}" for decoder in ("chain", "ddtree"))
    detail = f"{same} ({len(plain.tokens)} tokens), {exact}, target_forwards: {forwards}"
    return Check(name, True, f"{detail}  drafter=trained domain={domain}")


def logit_differences(case: GoldenCase, generation: Generation) -> np.ndarray:
    """Largest |engine − specification| of each token's logits: float32 [tokens], of those both have."""
    assert generation.logits is not None
    both = min(len(case.logits), len(generation.logits))
    return np.abs(generation.logits[:both] - case.logits[:both]).max(axis=1)


def own_text(case: GoldenCase, generation: Generation) -> np.ndarray:
    """A golden prompt and what an engine made of it: int32 [prompt + tokens]."""
    return np.concatenate([case.prompt, generation.tokens]).astype(np.int32)


def _equal_tokens(case: GoldenCase, generation: Generation) -> int:
    """Tokens that agree before the first that does not."""
    pairs = zip(case.tokens.tolist(), generation.tokens, strict=False)
    shorter = min(len(case.tokens), len(generation.tokens))
    return next((i for i, (golden, own) in enumerate(pairs) if golden != own), shorter)
