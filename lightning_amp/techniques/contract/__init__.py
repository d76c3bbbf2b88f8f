"""Define what a technique sees and returns: protocol of a decoder, Change, ShardedParameter, StandIn."""
