"""What bodies of requests and responses look like; unknown fields and loose types are refused."""
