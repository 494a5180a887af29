"""What many attacks on a mechanism say of its epsilon, with confidence."""
