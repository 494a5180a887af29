"""Many runs compared or predicted."""
