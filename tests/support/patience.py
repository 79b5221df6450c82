"""How many seconds tests wait for an event that must occur. Only a program that hangs takes so long."""

PATIENCE_S = 900
