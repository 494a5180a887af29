"""What a traced step computes, and the state that it captures."""
