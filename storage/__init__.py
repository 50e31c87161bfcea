"""What processes share: the storage table, anonymous shared memory, the layout, episode logs, digests."""
