"""What lives in the memory of one process only."""

from typing import Any

from hf_paged_cache.errors import UnsupportedError


class InProcess:
    """An object with blocks of a `BlockStore` behind it: `copy`, `deepcopy` and `pickle` raise `UnsupportedError`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"a {type(self).__name__} cannot be copied or pickled: its blocks are in the memory of this process, and "
            "others use them. `store.save(path)` writes what the store knows, and `BlockStore.load(path, model, "
            "memory=..)` makes another store of it"
        )
