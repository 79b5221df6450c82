"""Converts a release to one GGUF file, for llama.cpp and programs built on llama.cpp (Ollama, LM Studio)."""
