"""Finds out the identity of a model at every lookup, and reads of its weights only what has changed."""

import pickle
import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from hf_paged_kernels.modes import ordinary_tensors
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hf_paged_cache.codecs import KVQuant
from hf_paged_cache.errors import InvalidArgumentError, UnsupportedError
from hf_paged_cache.prefix.identity import Identity, canonical, codec_text

# Entries of a config that no key or value depends on: names, heads for classification, what `generate` reads. Not
# `pad_token_id`, from which some models count positions, nor `top_k`, which may be a number of experts.
_WITHOUT_EFFECT = frozenset((
    "_name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype", "use_cache",
    "return_dict", "output_hidden_states", "initializer_range", "id2label", "label2id", "problem_type", "bos_token_id",
    "eos_token_id", "max_new_tokens", "do_sample", "top_p", "num_beams", "num_return_sequences", "repetition_penalty",
))  # fmt: skip
# 32-bit words that are summed at once: few enough to stay in a CPU's cache, enough to fill a kernel of a GPU.
_PIECE = 2**16


class ModelIdentity:
    """The identity of a model, which may change between lookups.

    Weights are read once; then only those that were replaced, moved, written to in place (PyTorch counts that) or
    given to an optimizer that made a step. What no counter shows is not noticed until `invalidate()`: writing through
    `.data` or `numpy()`, replayed CUDA graphs, optimizers that are not PyTorch's, writing to weights that were made in
    inference mode, and hooks.

    All buffers count, also those that are not saved: rotary frequencies are such, and `model.to(torch.bfloat16)` rounds
    them. Adapters are found by what PEFT's layers look like, whether PEFT or transformers has put them in.

    Args:
        model: a transformers model.
        kv: how keys and values are stored, as in `PagedCache`.
        block_size: tokens a block.

    Raises:
        InvalidArgumentError: the model has no config, or there is no such codec.
    """

    def __init__(self, model: nn.Module, kv: str | KVQuant, block_size: int) -> None:
        if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "to_dict"):
            raise InvalidArgumentError(f"model is a {type(model).__name__}: expected a transformers model")
        self._model = model
        self._codec = codec_text(kv)
        self._block_size = block_size
        self._generation = 0
        self._weights = _Weights({}, "", "")
        self._config: tuple[bytes, str, str] | None = None
        # Fused optimizers write without counting a version.
        self._steps: dict[int, int] = {}
        weakref.finalize(self, register_optimizer_step_post_hook(_step_counter(self._steps)).remove)

    def current(self) -> Identity:
        """The identity of the model as it is now. Weights that have not changed are not read.

        Raises:
            UnsupportedError: weights have changed whose values cannot be read.
        """
        tensors: dict[str, Tensor] = {}
        adapters: dict[str, Any] = {}
        training = False
        for name, module in _named_modules(self._model):
            training |= module.training
            for parts in (module._parameters, module._buffers):
                for part, tensor in parts.items():
                    if tensor is not None:
                        tensors[name + part] = tensor
            if _has_adapters(type(module)):
                adapters[name.removesuffix(".")] = _adapter_state(module)
        weights = self._read_weights(tensors)
        config, implementations = self._read_config()
        model_class = type(self._model)
        return Identity(
            model_class=f"{model_class.__module__}.{model_class.__qualname__}",
            config=config,
            implementations=implementations,
            dtype=weights.dtype + _autocast(self._model),
            weights=weights.fingerprint,
            adapters=canonical(adapters),
            training=training,
            codec=self._codec,
            block_size=self._block_size,
            generation=self._generation,
        )

    def invalidate(self) -> None:
        """Says that the model has changed in a way that cannot be seen: nothing stored before fits it any more."""
        self._generation += 1
        self._weights = _Weights({}, "", "")
        self._config = None

    def _read_weights(self, tensors: Mapping[str, Tensor]) -> "_Weights":
        weights = self._weights
        known, changed = weights.known, {}
        for name, tensor in tensors.items():
            mark, entry = _mark(tensor, self._steps), known.get(name)
            if entry is None or entry.tensor() is not tensor or entry.mark != mark:
                changed[name] = mark
        if changed or len(known) != len(tensors):
            digests = _digests({name: tensors[name] for name in changed})
            read = {name: _Known(weakref.ref(tensors[name]), changed[name], digests[name]) for name in changed}
            known = {name: read.get(name) or known[name] for name in sorted(tensors)}
            fingerprint = blake2b(b"".join(entry.digest for entry in known.values()), digest_size=16).hexdigest()
            dtypes = {str(tensor.dtype) for tensor in tensors.values() if isinstance(tensor, nn.Parameter)}
            weights = self._weights = _Weights(known, fingerprint, ", ".join(sorted(dtypes)))
        return weights

    def _read_config(self) -> tuple[str, str]:
        config = self._model.config
        try:
            # Equal bytes mean equal configs. That the opposite need not hold costs a second reading, no more.
            state = pickle.dumps(config)
        except (pickle.PicklingError, TypeError, AttributeError):
            state = None
        if state is None or self._config is None or self._config[0] != state:
            texts = (canonical(_effective(config.to_dict())), canonical(_implementations(config)))
            self._config = (state, *texts)
        return self._config[1:]


class _Known(NamedTuple):
    """A tensor that was read. A reference knows it from a later one at the same address."""

    tensor: "weakref.ref[Tensor]"
    mark: tuple[Any, ...]
    digest: bytes


class _Weights(NamedTuple):
    """What was read of a model's parameters and buffers."""

    known: dict[str, _Known]
    fingerprint: str
    dtype: str


def _mark(tensor: Tensor, steps: Mapping[int, int]) -> tuple[Any, ...]:
    """What changes when a tensor is written to, moved or reshaped."""
    try:
        place = (tensor.data_ptr(), tensor._version)
    except RuntimeError:  # made in inference mode, which counts no versions, or a subclass without memory of its own
        place = None
    return place, tensor.shape, tensor.dtype, steps.get(id(tensor))


def _step_counter(steps: dict[int, int]) -> Any:
    """A hook that counts the steps of optimizers in `steps`, by the id of each parameter."""

    def count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                steps[id(parameter)] = steps.get(id(parameter), 0) + 1

    return count


@torch.no_grad()
def _digests(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """A hash of the name, dtype, shape and values of each tensor, with one transfer a device."""
    sums = {name: _sums(name, tensor) for name, tensor in tensors.items()}
    digests = {}
    for device in {each.device for each in sums.values()}:
        names = [name for name in sums if sums[name].device == device]
        on_host = torch.cat([sums[name] for name in names]).cpu()
        for name, values in zip(names, on_host.split([len(sums[name]) for name in names]), strict=True):
            about = canonical([name, str(tensors[name].dtype), list(tensors[name].shape)])
            digests[name] = blake2b(about.encode() + values.numpy().tobytes(), digest_size=16).digest()
    return digests


def _sums(name: str, tensor: Tensor) -> Tensor:
    """Sums over all bits of a tensor, int64 `[pieces]`: the same on every device and for any number of threads.

    A factor for each place makes any single change, and any two values that change places within a piece, visible. The
    factors look random, so that changes of many values (a sign, say) do not cancel.
    """
    try:
        # A view as bytes takes every dtype; `contiguous` copies only what is not.
        words = tensor.detach().contiguous().flatten().view(torch.uint8)
        words = nn.functional.pad(words, (0, -len(words) % 4))
        words = (words.clone() if words.storage_offset() % 4 else words).view(torch.int32)
        factors = _factors(min(len(words), _PIECE), words.device)
        sums = torch.stack([(piece * factors[: len(piece)]).sum() for piece in words.split(_PIECE)])
    except (RuntimeError, NotImplementedError) as error:
        raise _unreadable(name, tensor) from error
    if sums.is_meta or type(sums) is not Tensor:
        raise _unreadable(name, tensor)
    return sums


@lru_cache(maxsize=8)
def _factors(count: int, device: torch.device) -> Tensor:
    """Odd numbers without an order, int64 `[count]`: a product and a shift, twice, as in SplitMix64."""
    if count < _PIECE:
        return _factors(_PIECE, device)[:count]
    with ordinary_tensors():
        numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
        for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
            numbers = (numbers ^ (numbers >> 29)) * factor
        return numbers | 1


def _unreadable(name: str, tensor: Tensor) -> UnsupportedError:
    if hasattr(tensor, "device_mesh"):
        remedy = "load it on one device, without `tp_plan`. Sharded models take a PagedCache, but no store"
    else:
        remedy = "load the model without offloading"
    return UnsupportedError(
        f"the values of {name}, a {type(tensor).__name__} on device {tensor.device}, cannot be read, and so not be "
        f"compared with those that stored blocks were made with: {remedy}"
    )


def _autocast(model: nn.Module) -> str:
    """The dtype that keys are going to have instead of the parameters', in words; empty for none."""
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return f", autocast to {torch.get_autocast_dtype(kind)}" if torch.is_autocast_enabled(kind) else ""


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, with the prefix of its parts' names: `named_modules` at half its price."""
    seen, pending = {id(model)}, [("", model)]
    while pending:
        name, module = pending.pop()
        yield name, module
        for child_name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append((f"{name}{child_name}.", child))


@lru_cache
def _has_adapters(module_class: type) -> bool:
    """Whether a module is a layer with adapters as PEFT's are; models have methods where these have properties."""
    active = getattr(module_class, "active_adapters", None)
    return active is not None and not callable(active)


def _adapter_state(module: Any) -> dict[str, Any]:
    """What decides which adapters apply, as far as a module says it. Adapter weights are parameters."""
    disabled, scaling = getattr(module, "disable_adapters", False), getattr(module, "scaling", None)
    return {
        "active": _effective(module.active_adapters),
        "disabled": not callable(disabled) and bool(disabled),
        "merged": list(getattr(module, "merged_adapters", ())) or bool(getattr(module, "merged", False)),
        "scaling": _effective(scaling) if isinstance(scaling, dict) else None,
    }


def _effective(value: Any) -> Any:
    """Plain data for JSON; of a config, and of configs in it, without what has no effect on keys and values."""
    if isinstance(value, Mapping):
        dropped = _WITHOUT_EFFECT if "model_type" in value else ()
        return {str(key): _effective(entry) for key, entry in value.items() if key not in dropped}
    if isinstance(value, list | tuple):
        return [_effective(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if isinstance(value, str | int | float | None) else str(value)


def _implementations(config: Any) -> dict[str, Any]:
    """Names of the implementations that a config and its sub-configs choose."""
    nested = {name: value for name, value in vars(config).items() if hasattr(value, "_attn_implementation")}
    return {
        "attention": config._attn_implementation,
        "experts": getattr(config, "_experts_implementation", None),
        **{name: _implementations(value) for name, value in nested.items()},
    }
