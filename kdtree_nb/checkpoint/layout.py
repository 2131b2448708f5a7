"""Which stored tensors make which weight, held against the config before any of them is read."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kdtree_nb.bundle.bundle import Row
from kdtree_nb.bundle.format import FLOATS, check_count, fault
from kdtree_nb.checkpoint.folder import CONFIG, Folder, Rows
from kdtree_nb.config import Config, config_from_hf
from kdtree_nb.config.model import MAX_EXPERTS
from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE, quantized_names

FP8_BLOCK = 128
"""Rows and columns that share a scale in DeepSeek's fp8."""
WEIGHT = "weight"
FP8 = {WEIGHT, "weight_scale_inv"}
INT4 = {"weight_packed", "weight_scale", "weight_shape"}
UNSUPPORTED = {
    "weight_zero_point": "asymmetric quantisation, expected symmetric",
    "weight_g_idx": "act-order, expected groups of neighbouring inputs",
}
_PART = re.compile(r"\.(weight(?:_\w+)?)$")
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Weight(NamedTuple):
    """A weight of the model and where its values are.

    ``kind`` is ``float``; ``fp8``, with ``scales`` float32 [out / 128, in / 128]; or ``int4``, where ``data`` is
    ``weight_packed`` and ``scales`` ``weight_scale``.
    """

    kind: str
    shape: tuple[int, ...]
    data: Rows
    scales: Rows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the values and their scales."""
        return self.data.nbytes + (self.scales.nbytes if self.scales else 0)

    @property
    def dtypes(self) -> str:
        """What is stored, for a table."""
        return self.data.dtype + (f" + {self.scales.dtype}" if self.scales else "")


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose tensors are, each in its shape, those that its config asks for.

    Attributes
    ----------
    folder : Folder
    config : ModelConfig or DrafterConfig
    weights : mapping from the weight's name, without prefix and ``.weight``, to Weight
    skipped : mapping from stored name to Rows
        What the text model does not need: vision, prediction of further tokens, a tied head.
    """

    folder: Folder
    config: Config
    weights: Mapping[str, Weight]
    skipped: Mapping[str, Rows]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and their scales."""
        return sum(weight.nbytes for weight in self.weights.values())

    def rows(self) -> list[Row]:
        """One row a weight, in the order of the forward pass."""
        total = self.nbytes
        return [
            Row(name, weight.kind, weight.shape, weight.dtypes, weight.nbytes, weight.nbytes / total)
            for name, weight in self.weights.items()
        ]


def read_checkpoint(folder: Folder) -> Checkpoint:
    """Find every weight of the config.

    Raises
    ------
    BundleError
        Where the architecture, the quantisation or a tensor is not one that can be read; the message names it and
        what was expected.
    """
    settings = folder.settings
    try:
        config = config_from_hf(settings)
    except ValueError as error:
        raise fault(folder.path / CONFIG, str(error)) from error
    kinds = {"float", _quantisation(folder)}
    found, skipped = _group(folder)
    check_count(folder.path, config, len(found))
    packable, weights = quantized_names(config), {}
    for name, shape in config.weight_shapes().items():
        parts = found.pop(name, None)
        if parts is None:
            raise fault(folder.path, f"tensor '{folder.prefix}{name}.{WEIGHT}' {list(shape)} is missing")
        weight = weights[name] = _weight(shape, parts)
        if weight.kind not in kinds:
            raise fault(weight.data.file, f"tensor {weight.data.name!r} is {weight.kind}, which {CONFIG} does not say")
        if weight.kind == "int4" and name not in packable:
            raise fault(weight.data.file, f"tensor {weight.data.name!r} is packed, expected a float: {name!r} never is")
    for parts in found.values():
        for rows in parts.values():
            raise fault(rows.file, f"tensor {rows.name!r} is no weight of the config, expected none of that name")
    return Checkpoint(folder, config, weights, skipped)


def _group(folder: Folder) -> tuple[dict[str, dict[str, Rows]], dict[str, Rows]]:
    """``{weight: {part: Rows}}``, fused experts taken apart; and what is not needed."""
    found: dict[str, dict[str, Rows]] = {}
    skipped: dict[str, Rows] = {}
    layers = folder.settings.get("num_hidden_layers", 0)
    predictors = folder.settings.get("num_nextn_predict_layers") or 0
    further = range(layers, layers + predictors) if isinstance(predictors, int) else range(0)
    for stored, rows in folder.tensors.items():
        name = stored.removeprefix(folder.prefix)
        layer = _LAYER.match(name)
        if (
            not stored.startswith(folder.prefix)
            or (layer and int(layer[1]) in further)
            or name.endswith(".rotary_emb.inv_freq")  # older checkpoints keep this table
            or (name == "lm_head.weight" and folder.settings.get("tie_word_embeddings"))
        ):
            skipped[stored] = rows
            continue
        for weight, part, piece in _pieces(name, rows):
            if part in found.setdefault(weight, {}):
                raise fault(rows.file, f"tensor {stored!r}: {weight!r} is in {found[weight][part].name!r} already")
            found[weight][part] = piece
    return found, skipped


def _pieces(name: str, rows: Rows) -> Iterator[tuple[str, str, Rows]]:
    """The weight and the part of it that a tensor is; of fused experts, those of each expert."""
    fused = _FUSED.match(name)
    if fused is None:
        part = _PART.search(name)
        yield (name[: part.start()], part[1], rows) if part else (name, WEIGHT, rows)
        return
    at, kind = fused.groups()
    if len(rows.shape) != 3 or 0 in rows.shape or rows.shape[0] > MAX_EXPERTS:
        raise fault(rows.file, f"tensor {rows.name!r} is {list(rows.shape)}, expected [experts, out, in]")
    experts, out, columns = rows.shape
    stack = rows._replace(shape=(experts * out, columns))
    for expert in range(experts):
        begin, middle, end = expert * out, expert * out + out // 2, (expert + 1) * out
        if kind == "down_proj":
            yield f"{at}.{expert}.down_proj", WEIGHT, stack.slice(begin, end)
        else:
            yield f"{at}.{expert}.gate_proj", WEIGHT, stack.slice(begin, middle)
            yield f"{at}.{expert}.up_proj", WEIGHT, stack.slice(middle, end)


def _weight(shape: tuple[int, ...], parts: Mapping[str, Rows]) -> Weight:
    first = next(iter(parts.values()))
    for part, problem in UNSUPPORTED.items():
        if part in parts:
            raise fault(parts[part].file, f"tensor {parts[part].name!r}: {problem}")
    if parts.keys() == {WEIGHT}:
        return Weight("float", shape, _expect(parts[WEIGHT], FLOATS, shape))
    if parts.keys() == FP8:
        blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
        scales = _expect(parts["weight_scale_inv"], ("F32",), blocks)
        return Weight("fp8", shape, _expect(parts[WEIGHT], ("F8_E4M3",), shape), scales)
    if parts.keys() == INT4 and len(shape) == 2:
        out, columns = shape
        if columns % GROUP_SIZE:
            raise fault(
                first.file, f"tensor {first.name!r}: in_features={columns}, expected a multiple of {GROUP_SIZE}"
            )
        packed = _expect(parts["weight_packed"], ("I32",), (out, columns // CODES_PER_WORD))
        scales = _expect(parts["weight_scale"], FLOATS, (out, columns // GROUP_SIZE))
        written = _expect(parts["weight_shape"], ("I32", "I64"), (2,))
        if tuple(written.read().tolist()) != shape:
            raise fault(
                written.file, f"tensor {written.name!r} holds {written.read().tolist()}, expected {list(shape)}"
            )
        return Weight("int4", shape, packed, scales)
    wanted = " or ".join(", ".join(sorted(kind)) for kind in ({WEIGHT}, FP8, INT4))
    raise fault(first.file, f"tensor {first.name!r} comes as {', '.join(sorted(parts))}, expected {wanted}")


def _expect(rows: Rows, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> Rows:
    if rows.dtype not in dtypes or rows.shape != shape:
        wanted = f"{' or '.join(dtypes)} {list(shape)}"
        raise fault(rows.file, f"tensor {rows.name!r} is {rows.dtype} {list(rows.shape)}, expected {wanted}")
    return rows


def _quantisation(folder: Folder) -> str:
    """The kind of weight that config.json announces, every setting of it one that is understood."""
    settings = folder.settings.get("quantization_config")
    if settings is None:
        return "float"

    def expect(where: str, values: object, expected: Mapping[str, tuple[Any, ...]]) -> None:
        if not isinstance(values, Mapping):
            raise fault(folder.path / CONFIG, f"{where} is {values!r}, expected an object")
        for name, allowed in expected.items():
            value = values.get(name, allowed[0])
            if value not in allowed:
                wanted = " or ".join(map(repr, allowed))
                raise fault(folder.path / CONFIG, f"{where}.{name}={value!r}, expected {wanted}")

    at = "quantization_config"
    expect(at, settings, {"quant_method": (None, "fp8", "compressed-tensors")})
    if settings.get("quant_method") == "fp8":
        expect(at, settings, {"fmt": ("e4m3",), "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],)})
        return "fp8"
    expect(at, settings, {"quant_method": ("compressed-tensors",), "kv_cache_scheme": (None,)})
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise fault(folder.path / CONFIG, f"{at}.config_groups is {groups!r}, expected an object of groups")
    for name, group in groups.items():
        where = f"{at}.config_groups.{name}"
        expect(where, group, {"input_activations": (None,), "output_activations": (None,)})
        expect(where, {"format": group.get("format") or settings.get("format")}, {"format": ("pack-quantized",)})
        needed = {"num_bits": (4,), "type": ("int",), "strategy": ("group",), "group_size": (GROUP_SIZE,)}
        weights = group.get("weights")
        expect(f"{where}.weights", weights, needed | {"symmetric": (True,), "actorder": (None, False)})
        if missing := needed.keys() - weights.keys():
            raise fault(folder.path / CONFIG, f"{where}.weights.{min(missing)} is missing")
    return "int4"
