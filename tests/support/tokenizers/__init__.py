"""Small tokenizers in the shapes of public families, trained here, with chat templates in the form of each family; and odd chats."""
