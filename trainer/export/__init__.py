"""The trained model in forms that load without this package."""
