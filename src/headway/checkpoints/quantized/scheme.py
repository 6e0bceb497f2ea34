"""Reads the `quantization_config` of a config.json, strictly, and writes it.

quant_method        supported
compressed-tensors  weight-only, integers: "pack-quantized" (4 or 8 bits), one scale for each output or group of
                    inputs, symmetric or with zero points
gptq                4 or 8 bits, groups of contiguous inputs, with or without a checkpoint_format "gptq_v2"
awq                 4 bits, version "gemm", with zero points
mxfp4               4 bits, experts only (`headway.checkpoints.quantized.packed`)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headway.checkpoints.hf.config_keys import Allowed, check_keys
from headway.checkpoints.hf.harmless import words
from headway.errors import ConfigError, did_you_mean
from headway.native.panels import GROUP

KEY = "quantization_config"
COMPRESSED: Allowed = {
    **dict.fromkeys(
        ("quant_method", "config_groups", "format", "ignore", "global_compression_ratio", "version")
    ),
    **dict.fromkeys(("dequantize", "run_compressed", "use_optimized_inference")),
    "quantization_status": ("compressed", "frozen"),
}
COMPRESSED_GROUP: Allowed = {"targets": None, "weights": None, "format": None}
COMPRESSED_WEIGHTS: Allowed = {
    **dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "group_size", "symmetric")),
    "num_bits": (4, 8),
    "type": ("int",),
    "strategy": ("group", "channel"),
    "actorder": (False, "weight", "static"),
}
GPTQ: Allowed = {
    **dict.fromkeys(
        words(
            "quant_method group_size desc_act sym true_sequential static_groups meta damp_percent "
            "damp_auto_increment mse quantizer model_name_or_path tokenizer model_file_base_name dataset batch_size "
            "pad_token_id max_input_length backend model_seqlen block_name_to_quantize lm_head "
            "module_name_preceding_first_block modules_in_block_to_quantize use_exllama exllama_config "
            "disable_exllama cache_block_outputs use_cuda_fp16"
        )
    ),
    "bits": (4, 8),
    "checkpoint_format": ("gptq", "gptq_v2"),
    "pack_dtype": ("int32",),
}
AWQ: Allowed = {
    **dict.fromkeys(("quant_method", "group_size", "backend", "modules_to_not_convert", "exllama_config")),
    **dict.fromkeys(("do_fuse", "modules_to_fuse", "fuse_max_seq_len")),
    "bits": (4,),
    "zero_point": (True,),
    "version": ("gemm", "GEMM"),
}
MXFP4: Allowed = dict.fromkeys(("quant_method", "modules_to_not_convert", "dequantize"))


class Scheme(NamedTuple):
    """The quantization of a folder's weights.

    Attributes:
        form: "pack-quantized", "gptq", "awq" or "mxfp4".
        bits: 8 or 4.
        group: number of inputs that share a scale; None if a whole row does.
        zeros: whether zero points are stored.
        above: number to add to a stored zero point (gptq's first version stores one less).
    """

    form: str
    bits: int
    group: int | None
    zeros: bool
    above: int = 0

    def __str__(self) -> str:
        each = "a scale for each output" if self.group is None else f"groups of {self.group}"
        return f"int{self.bits}, {each}{', with zeros' if self.zeros else ''} ({self.form})"


def split_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Scheme | None]:
    """Returns a config.json without its `quantization_config`, and the quantization scheme; None if there is none.

    Raises ConfigError for methods, formats and keys that are not supported, naming those that are."""
    quantization = config.get(KEY)
    if quantization is None:
        return config, None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    read = _METHODS.get(str(method))
    if read is None:
        raise ConfigError(
            f'config.json: "{KEY}" has the unsupported quant_method {method!r}{did_you_mean(str(method), _METHODS)}; '
            f"supported are {', '.join(_METHODS)}, and unquantized checkpoints"
        )
    scheme = read(quantization)
    if scheme.group is not None and scheme.group % GROUP:
        raise ConfigError(
            f'config.json: group_size of "{KEY}" must be a multiple of {GROUP}, got {scheme.group}'
        )
    return {key: value for key, value in config.items() if key != KEY}, scheme


def written_config(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of a folder in the compressed-tensors format; `ignore` are the linear layers
    that are not quantized."""
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": not scheme.zeros,
        "strategy": "channel" if scheme.group is None else "group",
        "group_size": scheme.group,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": scheme.form}},
        "ignore": list(ignore),
    }


def _compressed(quantization: Mapping[str, Any]) -> Scheme:
    _check(quantization, COMPRESSED)
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(next(iter(groups.values())), dict):
        raise ConfigError(
            f'config.json: "{KEY}" must have one group of layers in config_groups, got {groups!r}'
        )
    (name, group), form = *groups.items(), quantization.get("format")
    _check(group, COMPRESSED_GROUP, f"config_groups.{name}.")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ConfigError(f'config.json: "{KEY}" has a group of layers without weights: {group!r}')
    _check(weights, COMPRESSED_WEIGHTS, f"config_groups.{name}.weights.")
    form = group.get("format") or form
    bits, strategy = weights.get("num_bits", 8), weights.get("strategy")
    if form != "pack-quantized":
        raise ConfigError(
            f'config.json: "{KEY}" has the unsupported format {form!r}; supported is "pack-quantized"'
        )
    size = _group_size(weights)
    if strategy is not None and (strategy == "group") != (size is not None):
        raise ConfigError(
            f'config.json: "{KEY}" has strategy {strategy!r}, which does not fit group_size {size}'
        )
    return Scheme(form, bits, size, not weights.get("symmetric", True))


def _gptq(quantization: Mapping[str, Any]) -> Scheme:
    _check(quantization, GPTQ)
    above = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
    return Scheme("gptq", _needed(quantization, "bits"), _group_size(quantization), True, above)


def _awq(quantization: Mapping[str, Any]) -> Scheme:
    _check(quantization, AWQ)
    return Scheme("awq", _needed(quantization, "bits"), _group_size(quantization), True)


def _mxfp4(quantization: Mapping[str, Any]) -> Scheme:
    _check(quantization, MXFP4)
    return Scheme("mxfp4", 4, GROUP, False)


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}


def _check(quantization: Mapping[str, Any], allowed: Allowed, place: str = "") -> None:
    check_keys(quantization, allowed, place=f"{KEY}.{place}", empty=True)


def _needed(quantization: Mapping[str, Any], key: str) -> Any:
    if quantization.get(key) is None:
        raise ConfigError(f'config.json: "{KEY}" lacks {key}')
    return quantization[key]


def _group_size(quantization: Mapping[str, Any]) -> int | None:
    size = quantization.get("group_size")
    if size is None or size == -1:
        return None
    if type(size) is not int or size < 1:
        raise ConfigError(
            f'config.json: group_size of "{KEY}" must be a positive whole number, -1 or null, got {size!r}'
        )
    return size
