"""A release as one GGUF file, for llama.cpp and the programs built on it (Ollama, LM Studio)."""
