"""Step 3 of the drafter: what its transition head is worth, on held-out prompts.

    python golden/train/heads.py

The target's greedy text of each prompt is drafted at every position, as the engine drafts it; then rounds are walked
through it with trees of the marginals, of the static head and of the gated one. Greedy text is the same whatever the
decoder, so a walk accepts what a verify pass would.

Output: ``drafter-heads.json`` beside the model: τ by head and budget, and how often a drafted child was right.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import numpy as np  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from kdtree_nb.acceptance import Walk, first_children  # noqa: E402
from kdtree_nb.engine import Engine, Proposal  # noqa: E402
from kdtree_nb.engine.cache import LatentCache  # noqa: E402
from kdtree_nb.engine.rounds import prefill  # noqa: E402
from kdtree_nb.reference.transition import reweigh  # noqa: E402
from kdtree_nb.reference.tree import (  # noqa: E402
    cut,
    tree_accept,
    tree_build,
)

BUDGETS = (8, 16, 32, 64, 128, 256)
NEW_TOKENS = 64
HEADS = ("marginals", "static", "gated")


def drafts(engine: Engine, prompt: str, tables: dict[str, np.ndarray]) -> tuple[list[dict[str, Proposal]], np.ndarray]:
    """For each new token's position what every head proposes there, and the new tokens."""
    tokens = np.array(engine.generate(prompt, "ar", max_new_tokens=NEW_TOKENS).tokens, np.int32)
    prompt_ids = np.array(engine.tokenizer.encode(prompt).ids, np.int32)
    text = np.concatenate([prompt_ids, tokens])
    cache = LatentCache(engine.config, len(text) + 1, engine.device)
    drafter = engine.drafter.start(cache)
    prefill(engine.model, cache, text, drafter)
    found = []
    for end in range(len(text) - 1, len(prompt_ids) - 1, -1):  # a block overwrites what lies behind it
        cache.length[:] = end - 1
        rows = drafter.rows(text[end - 1 : end])
        marginals = drafter.marginals(rows)
        static = static_conditionals(marginals.log_probs, marginals.token_ids, tables)
        found.append({"marginals": marginals, "static": static, "gated": drafter.conditioned(marginals, rows)})
    return found[::-1], tokens


def static_conditionals(log_probs: np.ndarray, token_ids: np.ndarray, tables: dict[str, np.ndarray]) -> Proposal:
    """The conditionals of the head that has no gate."""
    parents, children = tables["parent_table"][token_ids[:-1]], tables["child_table"][token_ids[1:]]
    conditionals, order = reweigh(log_probs, parents @ children.swapaxes(1, 2))
    return Proposal(conditionals, token_ids, order)


def walk(proposals: list[Proposal], tokens: np.ndarray, budget: int, chain: bool) -> list[Walk]:
    """The rounds through one text: each round's tree and the nodes that were accepted."""
    at, rounds = 0, []
    while at < len(tokens):
        left = len(tokens) - at - 1
        log_probs, token_ids, children = proposals[at]
        tree = tree_build(0, cut(log_probs, left, chain), token_ids, budget, children)
        tree = tree.first(tree.num_nodes)
        targets = tokens[at + tree.depths]
        path, _ = tree_accept(tree.tokens, tree.parents, targets)
        rounds.append(Walk(tree, path))
        at += len(path)
    return rounds


def main() -> None:
    model = HERE.parent / "kdt16m"
    engine = Engine.load(model / "kdt16m-int4.kdtr", "cpu")
    static = load_file(HERE / "build" / "drafter-static.safetensors")
    tables = {name.removeprefix("transition."): tensor.float().numpy() for name, tensor in static.items()}
    prompts = json.loads((model / "prompts.json").read_text(encoding="utf-8"))
    texts = []
    for number, prompt in enumerate(prompts):
        texts.append((prompt["domain"], *drafts(engine, prompt["text"], tables)))
        print(f"\r  {number + 1} of {len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    results = []
    for head in HEADS:
        for budget in (None, *BUDGETS):
            tau: dict[str, list[int]] = {}
            walked: list[Walk] = []
            for domain, proposals, tokens in texts:
                length = engine.drafter.config.block_size - 1
                rounds = walk([p[head] for p in proposals], tokens, budget or length, budget is None)
                counted = tau.setdefault(domain, [0, 0])
                counted[0] += len(tokens)
                counted[1] += len(rounds)
                walked += rounds
            by_domain = {domain: round(count / forwards, 3) for domain, (count, forwards) in tau.items()}
            result = {"head": head, "node_budget": budget or "chain", "tau": by_domain,
                      "mean": round(float(np.mean(list(by_domain.values()))), 3)}  # fmt: skip
            if budget:
                result["children"] = first_children(walked)
            results.append(result)
            print(f"  {head:10s}{result['node_budget']!s:>6s}  τ {result['mean']:.2f}  {by_domain}", flush=True)
    record = {"new_tokens": NEW_TOKENS, "prompts": len(prompts), "results": results}
    (model / "drafter-heads.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
