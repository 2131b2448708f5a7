"""The bench commands that run an engine: their options and tables."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kdtree_nb.bench.shown import Peers, missing, show, time_cell, tracked
from kdtree_nb.console import BUDGET, Device, Dtype, JsonFile, err, node_budget_of, out
from kdtree_nb.golden import folder

if TYPE_CHECKING:
    from kdtree_nb.bench.floors import Measured

BundleFile = Annotated[Path | None, typer.Option("--bundle", help="By default the repository's trained model.")]


def bench_acceptance(
    domain: Annotated[list[str] | None, typer.Option(help="Of the held-out prompts; all by default.")] = None,
    decoder: Annotated[
        list[str] | None, typer.Option(help="plain, ngram, chain, marginal (no transition head), ddtree; all.")
    ] = None,
    node_budget: Annotated[
        list[Any] | None, typer.Option(parser=node_budget_of, metavar=BUDGET, help="4 to 256 and auto by default.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Of each domain, at most.")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: the most probable token; above: samples.")] = 0.0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json_file: JsonFile = None,
) -> None:
    """Accepted drafts on held-out prompts. The options --domain, --decoder and --node-budget may be repeated."""
    from rich.progress import Progress

    from kdtree_nb.acceptance import METHODS, automatic_costs, cells, measure, over_domains
    from kdtree_nb.demo import trained_bundle
    from kdtree_nb.engine import Engine
    from kdtree_nb.engine.options import check_options
    from kdtree_nb.golden import held_out_prompts
    from kdtree_nb.kernels.choose_tokens import Sampling
    from kdtree_nb.record import record

    wanted, path = cells(decoder or [], node_budget or []), trained_bundle(folder())
    for cell in wanted:
        check_options(METHODS[cell.decoder].decoder, cell.node_budget, tokens, Sampling(temperature))
    held_out = held_out_prompts(path.parent)
    for name in domain or []:
        if name not in held_out:
            raise ValueError(f"bench acceptance: domain={name!r}, expected one of {', '.join(held_out)}")
    chosen = {name: held_out[name][:prompts] for name in domain or held_out}
    engine = Engine.load(path, device, dtype=dtype)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=len(wanted) * sum(map(len, chosen.values())))
        step = partial(bar.update, task, advance=1)
        results = list(measure(engine, chosen, wanted, tokens, temperature, lambda doing: step(description=doing)))
    columns = ("τ", "τ ≤ 32", "τ > 32", "forwards", "drafted", "tokens/s", "distinct bigrams")
    keys = (
        "tau",
        "tau_first_32",
        "tau_after_32",
        "target_forwards",
        "drafted",
        "tokens_per_second",
        "distinct_bigrams",
    )
    table = Table("domain", "decoder", "B", *columns)
    rows = [*results, *over_domains(results)]
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        values = ["" if row[key] is None else f"{row[key]:.{2 * (type(row[key]) is float)}f}" for key in keys]
        last = following is None or following["domain"] != row["domain"]
        table.add_row(row["domain"], row["decoder"], str(row["node_budget"]), *values, end_section=last)
    out.print(table)
    if json_file is not None:
        settings: dict[str, Any] = {"bundle": path.name, "drafter": repr(engine.drafter), "dtype": dtype}
        settings |= {"tokens": tokens, "temperature": temperature}
        settings["prompts"] = {name: len(texts) for name, texts in chosen.items()}
        settings["round_costs"] = automatic_costs(engine, wanted)
        record(json_file, device, results, settings=settings)


def bench_step(bundle: BundleFile = None, dtype: Dtype = "float32", json_file: JsonFile = None) -> None:
    """A round of the engine by rows: its pass beside the cost model's floor, and where the rest of its time goes."""
    from kdtree_nb.bench import step
    from kdtree_nb.bench.ceilings import ceilings
    from kdtree_nb.demo import trained_bundle
    from kdtree_nb.engine import Engine
    from kdtree_nb.record import record

    limits = ceilings()
    engine = Engine.load(bundle or trained_bundle(folder()), "cuda", dtype=dtype)
    engine.preload()
    found = tracked(step.measure(engine, step.ROWS), len(step.ROWS))
    title = f"a round, in µs; floor: {engine.bundle.path.name}'s bytes at {limits.read_gb_per_s:,.0f} GB/s"
    table = Table("rows", "pass", "floor", "/ floor", "draft", "build", "accept, commit", "idle", "round", title=title)
    for one in found:
        floor = one.measured.floor(limits)
        rest = (one.draft, one.build, one.commit, one.idle, one.round)
        table.add_row(
            str(one.rows), *map(time_cell, (one.verify, floor)), f"{one.verify / floor:.2f}", *map(time_cell, rest)
        )
    out.print(table)
    if json_file is not None:
        settings = {"bundle": engine.bundle.path.name, "drafter": repr(engine.drafter), "dtype": dtype}
        record(json_file, "cuda", [o._asdict() for o in found], ceilings=limits._asdict(), settings=settings)


def bench_model(
    bundle: BundleFile = None,
    dtype: Dtype = "float32",
    prompt_tokens: Annotated[int | None, typer.Option(help="By default 512, or what the model has room for.")] = None,
    layer: Annotated[str | None, typer.Option(help="kimi-k2: one layer in full size, random weights, as well.")] = None,
    with_peers: Peers = False,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second of every decoder, beside the memory's floor for plain decoding and transformers' generate."""
    from kdtree_nb.bench import layer as layers
    from kdtree_nb.bench import model
    from kdtree_nb.bench.ceilings import ceilings
    from kdtree_nb.demo import trained_bundle
    from kdtree_nb.engine import Engine
    from kdtree_nb.record import record

    if layer is not None:
        layers.config_of(layer)
    lacking = missing(with_peers, "transformers", "torch", "transformers")
    limits = ceilings()
    before = model.memory_held()
    engine = Engine.load(bundle or trained_bundle(folder()), "cuda", dtype=dtype)
    prompt = model.prompt_length(prompt_tokens, engine.capacity)
    engine.preload()
    runs = tracked(model.measure(engine, prompt), len(model.WAYS))
    held, floor = model.memory_held() - before, model.floor(engine, prompt, limits, dtype)
    about = {"memory_bytes": float(held), "floor_tokens_per_second": floor}
    if with_peers and not lacking:
        about["transformers_tokens_per_second"] = model.transformers_tokens_per_second(engine.config, prompt)
    name = engine.bundle.path.name
    title = f"{name}, {dtype}: {model.NEW_TOKENS} tokens after {prompt}"
    table = Table("decoder", "B", "tokens/s", "/ floor of ar", "τ", "forwards", "prompt tokens/s", title=title)
    for run in runs:
        rate = run.tokens_per_second
        values = f"{rate:,.0f}", f"{rate / floor:.3f}", f"{run.acceptance_length:.2f}"
        prefill = f"{run.prefill_tokens_per_second:,.0f}"
        table.add_row(run.decoder, str(run.node_budget), *values, str(run.target_forwards), prefill)
    out.print(table)
    for what, value in about.items():
        out.print(f"{what} {value:,.0f}")
    measured: list[Measured] = []
    if layer is not None:
        del engine
        measured = tracked(layers.measure(layer, layers.ROWS, dtype), len(layers.ROWS))
        show(f"one layer of {layer}", measured, limits)
        for one in measured:
            rate = layers.passes_per_second(one.microseconds)
            paper = f"{layers.KIMI_LAYERS} layers on {layers.GPUS} GPUs, on paper: {rate:.0f} passes/s"
            out.print(f"{paper} of {one.case['rows']} rows, at most")
    if json_file is not None:
        settings = {"bundle": name, "dtype": dtype, "prompt_tokens": prompt, "new_tokens": model.NEW_TOKENS}
        results = [run._asdict() for run in runs] + [one._asdict() for one in measured]
        record(json_file, "cuda", results, ceilings=limits._asdict(), missing=lacking, settings=settings, **about)


def bench_load(
    bundle: Annotated[Path, typer.Option(help="A .kdtr file, a .kdtr.index.json, or the folder of one.")],
    json_file: JsonFile = None,
) -> None:
    """Load all of a bundle to the GPU: its rate, beside the bus's and the disk's."""
    from kdtree_nb.bench.load import measure
    from kdtree_nb.record import record

    found = measure(bundle)
    out.print(f"opened in {found.open_seconds:.2f} s; {found.gpu_bytes / 1e9:,.2f} GB on the GPU")
    for loading in found.loadings:
        out.print(
            f"{loading.source:5}  {found.bytes / 1e9:,.2f} GB in {loading.seconds:.2f} s, "
            f"{loading.gb_per_s:.1f} GB/s: {loading.share:.0%} of the slower of bus ({found.bus_gb_per_s:.1f}) "
            f"and reading ({loading.read_gb_per_s:.1f})",
            soft_wrap=True,
        )
    if json_file is not None:
        about = found._asdict()
        results = [loading._asdict() for loading in about.pop("loadings")]
        record(json_file, "cuda", results, bundle=bundle.name, **about)


def bench_cpu(json_file: JsonFile = None) -> None:
    """Plain decoding in NumPy beside what BLAS takes for the same weights; one thread: OPENBLAS_NUM_THREADS=1."""
    from kdtree_nb.bench.cpu import measure
    from kdtree_nb.demo import trained_bundle
    from kdtree_nb.engine import Engine
    from kdtree_nb.golden import held_out_prompts
    from kdtree_nb.record import record

    path = trained_bundle(folder())
    prompt = next(iter(held_out_prompts(path.parent).values()))[0]
    with err.status("decoding and multiplying in turn"):
        found = measure(Engine.load(path, "cpu"), prompt)
    out.print(f"{found.decode:.2f} ms a token; products alone {found.floor:.2f} ms: {found.ratio:.2f} times as long")
    if json_file is not None:
        record(json_file, "cpu", [found._asdict() | {"ratio": found.ratio}], bundle=path.name)
