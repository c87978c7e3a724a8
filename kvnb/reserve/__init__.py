"""What a reserved block costs: a paged block pool, and a request trace replayed through batching."""
