"""OpenAI's API as requests are written in it: ``request`` reads one, ``defaults`` says what an export asks for where it does not."""
