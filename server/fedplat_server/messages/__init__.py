"""What handlers and the halves of kinds do with messages: validate and convert them, and stream files within limits."""
