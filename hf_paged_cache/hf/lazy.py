"""Tensors that stand for something not computed yet, and become it as soon as an operation reads them."""

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from hf_paged_kernels import StepMetadata
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_paged_cache.blocks.tables import BlockTable
from hf_paged_cache.errors import CacheStateError, UnsupportedError
from hf_paged_cache.memory.layer_pool import LayerPool

logger = logging.getLogger(__name__)

GATHER_HINT = (
    "This attention implementation reads a PagedCache by copying it out of its blocks: right, but slower than "
    'attention that reads the blocks in place. Use attn_implementation="hf_paged" in `from_pretrained`, or '
    'model.set_attn_implementation("hf_paged").'
)

GRADIENT_HINT = (
    "A PagedCache stores keys and values without their graph: gradients flow through the tokens of this forward pass, "
    "not through cached ones. Use `torch.no_grad()` if you need none, or train without a cache."
)


class LazyTensor(torch.Tensor):
    """A tensor with a shape, dtype and device but no data; any operation on it works on `materialize()` instead.

    Shape and the like are answered without computing anything, so that model code may look at them freely.
    """

    # Straight to `__torch_dispatch__`: looking at a shape then costs no Python call.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> "LazyTensor":
        """A tensor of that look; subclasses add what they need to compute it."""
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def materialize(self) -> torch.Tensor:
        """The dense tensor, computed at most once."""
        raise NotImplementedError

    def read_by(self, func: Callable) -> torch.Tensor:
        """What stands in for this tensor as an argument of `func`."""
        return self.materialize()

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                _refuse_write(argument, value)
            for argument in func._schema.arguments:
                _refuse_write(argument, kwargs.get(argument.name))
        args, kwargs = tree_map_only(LazyTensor, lambda lazy: lazy.read_by(func), (args, kwargs))
        return func(*args, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise _no_edit(self)

    def apply_(self, function: Callable) -> NoReturn:  # type: ignore[override]
        raise _no_edit(self)

    def map_(self, other: torch.Tensor, function: Callable) -> NoReturn:  # type: ignore[override]
        raise _no_edit(self)

    def share_memory_(self) -> NoReturn:
        raise _no_edit(self)

    # What follows reads memory without an operation, and a lazy tensor has none.

    def numpy(self, *, force: bool = False) -> Any:
        return self.materialize().numpy(force=force)

    def tolist(self) -> list:
        return self.materialize().tolist()

    def data_ptr(self) -> int:
        return self.materialize().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.materialize().untyped_storage()

    def __array__(self, dtype: Any = None) -> Any:
        return self.materialize().__array__(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.materialize().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.materialize().__dlpack_device__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.materialize().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)


def _refuse_write(argument: Any, value: Any) -> None:
    """Refuses a lazy tensor as an argument that an operation writes to."""
    if argument.alias_info is not None and argument.alias_info.is_write:
        for tensor in tree_leaves(value):
            if isinstance(tensor, LazyTensor):
                raise _no_edit(tensor)


def _no_edit(tensor: LazyTensor) -> UnsupportedError:
    return UnsupportedError(f"a {type(tensor).__name__} cannot be changed in place: change a `.clone()` of it")


class KVSource(NamedTuple):
    """Where the keys and values of one layer in one forward pass are.

    Attributes:
        pool: the blocks of the layer.
        step: the forward pass.
        table: the block table that the step was taken from.
        generation: `table.generation` then.
        first_column: first column that the layer shows; later than 0 in windowed layers.
        window: tokens that the layer keeps at least, as `BlockTable` counts them; `None` for all.
    """

    pool: LayerPool
    step: StepMetadata
    table: BlockTable
    generation: int
    first_column: int
    window: int | None

    @property
    def is_current(self) -> bool:
        """Whether the blocks still hold what they held at the time of the step."""
        return self.table.generation == self.generation


class LazyKV(LazyTensor):
    """Keys or values of one layer, `[batch, num_kv_heads, columns, dim]`, still in their blocks.

    Attention that knows blocks reads them in place, through `source`. Any other operation copies them out, which is
    right with every attention implementation, only slower. Columns of leading padding that are not new read as zero.
    The copy is the reader's: a view of it may be changed, which changes nothing in the cache.

    It is valid for the forward pass it comes from: until the blocks it reads are given back or rewritten.

    Attributes:
        source: where the data are.
        new: keys or values of the new tokens, `[batch, num_kv_heads, query_length, dim]`; `None` outside a step.
    """

    source: KVSource
    new: torch.Tensor | None

    @classmethod
    def of(cls, source: KVSource, part: Literal["key", "value"], new: torch.Tensor | None) -> "LazyKV":
        """The keys or the values of `source`."""
        geometry, step = source.pool.geometry, source.step
        is_key = part == "key"
        dim = geometry.key_dim if is_key else geometry.value_dim
        dtype = geometry.key_dtype if is_key else geometry.value_dtype
        shape = (step.batch, geometry.num_kv_heads, step.num_columns - source.first_column, dim)
        lazy = cls.make(shape, dtype, geometry.device)
        lazy.source = source
        lazy.new = new
        lazy._part = part
        lazy._dense = None
        return lazy

    def materialize(self) -> torch.Tensor:
        if self._dense is None:
            self._dense = self._gather()
        return self._dense

    def read_by(self, func: Callable) -> torch.Tensor:
        return as_dense(self)

    def with_gradients(self) -> torch.Tensor:
        """The dense tensor, through which gradients flow to the new tokens; the cached ones are constants."""
        num_past = self.shape[2] - self.new.shape[2]
        if num_past == 0:
            return self.new
        hint_once(GRADIENT_HINT)
        return torch.cat([self.materialize()[:, :, :num_past], self.new], dim=2)

    def _gather(self) -> torch.Tensor:
        source, step = self.source, self.source.step
        if self.new is not None and self.new.shape[2] == self.shape[2]:
            return self.new.contiguous()  # as a tensor of this shape claims to be
        if not source.is_current:
            raise CacheStateError(
                "these keys and values belong to an earlier forward pass, and the blocks they were in have been given "
                "back or rewritten since. Read them in the pass that returned them, or keep a copy with `.clone()`."
            )
        # A codec that loses bits still lets the new tokens be attended to exactly.
        stored_only = self.new is None or (step.new_tokens_stored and source.pool.codec.is_exact)
        last_column = step.num_columns if stored_only else step.first_column
        pool = source.pool
        stored = pool.codec.read(pool.blocks, self._part, step, source.first_column, last_column)
        return stored if stored_only else torch.cat([stored, self.new], dim=2)


def has_numbers(states: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary or lazy one: not distributed, fake, or on the meta device."""
    kind = type(states)
    if kind is torch.Tensor:
        return not states.is_meta
    is_plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return (is_plain and not states.is_meta) or isinstance(states, LazyTensor)


def as_dense(states: torch.Tensor) -> torch.Tensor:
    """Keys or values as an ordinary tensor, for attention that does not read blocks."""
    if not isinstance(states, LazyKV):
        return states
    hint_once(GATHER_HINT)
    return states.materialize()


_hints_given: set[str] = set()


def hint_once(message: str) -> None:
    """Logs `message` as a warning, the first time in a process."""
    if message not in _hints_given:
        _hints_given.add(message)
        logger.warning(message)
