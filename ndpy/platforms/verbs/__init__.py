"""The public classes over libibverbs and librdmacm."""
