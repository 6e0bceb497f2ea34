"""Expert parallelism: each rank holds all other layers completely, and its own part of the experts in every mixture.

shards = shard_experts(model, ExpertParallel(exchange))          in place, on every rank
"""

from headway.errors import ConfigError
from headway.models.build import Model
from headway.models.spec import ModelSpec
from headway.nn import MixtureOfExperts, adapter_names
from headway.parallel import ExpertParallel, Shards, TensorParallel
from headway.parallel.tensor import share


def shard_experts(model: Model, ranks: ExpertParallel) -> Shards:
    """Keeps only this rank's experts in every mixture of `model`, in place; `model.shards` records which they are.

    Each rank processes its own tokens, as in data parallelism, unless `ranks.same_rows`. The gradient of an expert
    already covers the rows of all ranks; all other gradients must be summed over ranks.

    Raises ConfigError if the model is sharded already or has adapters, and as `check_experts` does.
    """
    if model.shards is not None:
        raise ConfigError("expert parallel: this model is already sharded; build a new one")
    if adapter_names(model):
        raise ConfigError("expert parallel: models with adapters are not supported; leave expert out")
    check_experts(model.spec, ranks.exchange.ranks)
    owned: dict[str, tuple[str, ...]] = {}
    layers = {name: m for name, m in model.named_modules() if isinstance(m, MixtureOfExperts)}
    for name, layer in layers.items():
        local = layer.divide(ranks)
        for expert in local:
            # rank i holds experts i n .. i n + n - 1: with n = 4, expert 6 (second on rank 1) matches 2, 6, 10, ...
            counterparts = [i * len(local) + expert - local.start for i in range(ranks.exchange.ranks)]
            for leaf in layer.experts[expert].state_dict():
                owned[f"{name}.experts.{expert}.{leaf}"] = tuple(
                    f"{name}.experts.{i}.{leaf}" for i in counterparts
                )
    model.shards = Shards(TensorParallel(ranks.exchange), {}, frozenset(), owned)
    return model.shards


def check_experts(spec: ModelSpec, ranks: int) -> None:
    """Raises ConfigError if the number of ranks does not divide the experts of every layer, if the model has no
    experts, or if it has dropout within experts, whose random numbers would differ from those of a single process."""
    layers = (*spec.experts, *(() if spec.encoder is None else spec.encoder.experts))
    if not any(layers):
        raise ConfigError("expert parallel: this model has no experts; leave expert out")
    for experts in layers:
        share(0 if experts is None else experts.count, "experts", ranks, 0, "expert")
    if spec.activation_dropout:
        raise ConfigError(
            f"expert parallel: activation_dropout={spec.activation_dropout} is not supported (random masks would "
            "differ from those of one process); set it to 0"
        )
