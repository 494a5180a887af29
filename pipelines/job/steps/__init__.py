"""The DoFns of the job."""
