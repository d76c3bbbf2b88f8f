"""Diagnosis and hardware -> Plan."""
