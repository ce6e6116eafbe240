"""Remote tiers: chunks in a store that several nodes share."""
