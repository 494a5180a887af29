"""Arguments of ``make_private``'s ``fit``: example weights, epochs and callbacks."""
