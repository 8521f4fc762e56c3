"""What runs an exchange: communicators, transports, checks. Nothing here is public."""
