"""What workers do in each step of the job."""
