"""A bounded store of what was made before; small data sets then fit in it whole, large ones do no harm."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class BoundedCache:
    """Least recently used entries go when the weights of all add up to more than `capacity`."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._weight = 0

    def get(self, key: Hashable, make: Callable[[], Any], weigh: Callable[[Any], int]) -> Any:
        """The entry of `key`, made if it is not there. The caller must not change it."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key][0]
        value = make()
        weight = weigh(value)
        if weight > self.capacity:
            return value
        self._entries[key] = value, weight
        self._weight += weight
        while self._weight > self.capacity:
            self._weight -= self._entries.popitem(last=False)[1][1]
        return value

    def clear(self) -> None:
        self._entries.clear()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._entries)
