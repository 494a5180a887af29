"""What a run is asked to do: frozen, public, checked."""
