"""Files of models on disk: the safetensors format, and the folder of a public model. They are read as untrusted, one tensor at a time."""
