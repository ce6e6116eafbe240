"""The eviction policies that PDX has."""
