"""What the two configs read and check alike; every error names the field, its value and what was expected."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise the ValueError of a field unless a condition holds."""
    if not holds:
        raise ValueError(f"config: {name}={value!r}, expected {expected}")


def require_whole_numbers(config: Any, may_be_zero: Collection[str], may_be_none: Collection[str]) -> None:
    """Check a dataclass's fields of type int, and the optional ones that are set: from 1, or where allowed from 0."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is int or (field.name in may_be_none and value is not None):
            lowest = 0 if field.name in may_be_zero else 1
            whole = type(value) is int and lowest <= value < 2**31
            require(whole, field.name, value, f"a whole number from {lowest}")


def require_at_most(config: Any, limits: Mapping[str, int]) -> None:
    """Check whole numbers against the largest that the kernels take, before a first pass meets them."""
    for name, most in limits.items():
        require(getattr(config, name) <= most, name, getattr(config, name), f"at most {most}, as the kernels take it")


def require_eps_and_theta(config: Any) -> None:
    """Check what every norm adds, and what every rotation is a power of."""
    eps, theta = config.rms_norm_eps, config.rope_theta
    require(is_number(eps) and eps >= 1e-30, "rms_norm_eps", eps, "a number that float32 can add, from 1e-30")
    require(is_number(theta) and theta > 1, "rope_theta", theta, "a finite number above 1")


def is_number(value: object) -> bool:
    """A finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2.0**63


def mapping(hf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object of ``config.json``; empty where it is missing or null."""
    value = hf.get(name) or {}
    require(isinstance(value, Mapping), name, value, "an object or null")
    return value


def require_settings(hf: Mapping[str, Any], settings: Mapping[str, object]) -> None:
    """Check the settings that ``config.json`` may leave out, but not have otherwise."""
    for name, expected in settings.items():
        require(hf.get(name, expected) == expected, name, hf.get(name), repr(expected))


def fields_of(cls: type, *sources: Mapping[str, Any]) -> dict[str, Any]:
    """The values that ``config.json`` gives to a dataclass's fields of the same names; a later source wins."""
    names = [field.name for field in dataclasses.fields(cls)]
    return {name: source[name] for source in sources for name in names if name in source}


def rope_of(hf: Mapping[str, Any]) -> tuple[Any, str, Mapping[str, Any]]:
    """Theta, the type of scaling (``default``: none), and its settings, from where either transformers keeps them."""
    parameters = mapping(hf, "rope_parameters")  # transformers 5 moved theta and scaling in here
    theta = parameters.get("rope_theta", hf.get("rope_theta", 10000.0))
    scaling = mapping(hf, "rope_scaling") or parameters
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return float(theta) if is_number(theta) else theta, kind, scaling


def require_all(cls: type, values: Mapping[str, Any]) -> None:
    """Name the fields of a dataclass that have neither a value nor a default."""
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise ValueError(f"config: missing {', '.join(missing)}")


def swiglu_shapes(prefix: str, hidden_size: int, width: int) -> dict[str, tuple[int, int]]:
    """Names and shapes [out, in] of a gate, an up and a down projection."""
    return {
        f"{prefix}.gate_proj": (width, hidden_size),
        f"{prefix}.up_proj": (width, hidden_size),
        f"{prefix}.down_proj": (hidden_size, width),
    }
