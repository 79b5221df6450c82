"""How long tests wait for what must come. No slow or busy machine takes so long: only what hangs does."""

PATIENCE_S = 900
