"""The tracer: a forward pass recorded as operations and steps, and what is known of each."""
