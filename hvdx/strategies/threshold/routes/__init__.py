"""Routes of messages between the ranks."""
