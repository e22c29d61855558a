"""Low copies of weights: kept across calls, never stale."""
