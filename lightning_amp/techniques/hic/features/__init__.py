"""S2, feature parallel: columns of the first encoder layer, features of a stratum."""
