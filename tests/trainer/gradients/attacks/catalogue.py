"""Cases: models, losses and views that attack the bound, or only look like it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from tests.trainer.gradients.attacks.keras_parts import (
    Call,
    Holder,
    Make,
    honest_network,
    network_around,
    network_of,
    tame_layer,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attack, or an honest neighbour of one.

    Attributes:
      network: Makes the Keras model; its argument chooses what follows the attack, and
        so the path.  None for ``whole``.
      whole: Makes the Keras model, which alone decides its path.
      loss: Makes the function (labels, outputs) -> losses from the model; None for the
        default.
      augment: Makes the augmentation; None for one view.
      leaks: Whether it must be refused, even if the sum of gradients is right.
      honest: Whether it must be accepted.
      remembers: Whether it may take two steps, with other pasts, to see it.
    """

    network: Callable[..., Any] | None = None
    whole: Callable[[], Any] = honest_network
    loss: Callable[[Any], Callable[[Any, Any], Any]] | None = None
    augment: Callable[[], Any] | None = None
    leaks: bool = False
    honest: bool = False
    remembers: bool = False

    def model(self, base: str) -> Any:
        """Returns a new Keras model.

        Args:
          base: Path on which an honest model is computed, if the case has a choice.
        """
        return self.whole() if self.network is None else self.network(base)


class Cases(dict[str, Case]):
    """Cases by name; its methods decorate what makes a case."""

    def __init__(self, kind: str, **always: Any) -> None:
        super().__init__()
        self._kind, self._always = kind, always

    def put(self, name: str, case: Case) -> None:
        """Adds a case, whose name must be new."""
        name = f"{self._kind}: {name}"
        assert name not in self, name
        self[name] = case

    def layer(self, make: Make | None = None, **more: Any) -> Any:
        """Adds a layer; the function makes its variables and returns its call."""
        if make is None:
            return functools.partial(self.layer, **more)
        self.put(_name(make), self._case(functools.partial(network_around, make), more))
        return make

    def state(self, make: Callable[[Any], Any], **more: Any) -> Any:
        """Adds a layer with state: (state, values, ids) -> values; None for the same.

        Args:
          make: Makes the state of a layer while it is built.
          **more: Fields of the case.
        """

        def add(function: Callable[[Any, Any, Any], Any]) -> Any:
            def layer(layer: Any) -> Call:
                state = make(layer)

                def call(values: Any, ids: Any) -> Any:
                    found = function(_shown(state), values, ids)
                    return values if found is None else found

                return call

            layer.__name__ = function.__name__
            self.layer(layer, **more)
            return function

        return add

    def call(self, function: Call | None = None, **more: Any) -> Any:
        """Adds a layer without variables: (values, ids) -> values."""
        if function is None:
            return functools.partial(self.call, **more)
        network = functools.partial(network_around, lambda layer: function)
        self.put(_name(function), self._case(network, more))
        return function

    def body(self, name: str, body: Callable[[Any, Any], Any], **more: Any) -> None:
        """Adds layers: (values, ids) -> values, of Keras's tensors."""
        self.put(name, self._case(functools.partial(network_of, body), more))

    def of_values(self, name: str, apply: Callable[[Any], Any], **more: Any) -> None:
        """Adds layers that are applied to tame values (batch, 6)."""
        self.body(name, lambda values, ids: apply(tame_layer(values, ids)), **more)

    def network(self, make: Callable[..., Any] | None = None, **more: Any) -> Any:
        """Adds a whole network."""
        if make is None:
            return functools.partial(self.network, **more)
        self.put(_name(make), Case(whole=make, **{**self._always, **more}))
        return make

    def loss(self, make: Callable[[Any], Any] | None = None, **more: Any) -> Any:
        """Adds a loss; the function takes the model and returns the loss."""
        if make is None:
            return functools.partial(self.loss, **more)
        self.put(_name(make), Case(loss=make, **{**self._always, **more}))
        return make

    def view(self, make: Callable[[], Any] | None = None, **more: Any) -> Any:
        """Adds an augmentation, which the function makes."""
        if make is None:
            return functools.partial(self.view, **more)
        self.put(_name(make), Case(augment=make, **{**self._always, **more}))
        return make

    def _case(self, network: Callable[..., Any], more: dict[str, Any]) -> Case:
        return Case(network=network, **{**self._always, **more})


def _shown(state: Any) -> Any:
    return (
        state.held[0] if isinstance(state, Holder) and len(state.held) == 1 else state
    )


def _name(function: Callable[..., Any]) -> str:
    return function.__name__.strip("_").replace("_", " ")
