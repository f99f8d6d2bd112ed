"""The OpenAI wire format: schemas, endpoints, chat templates and the error table."""
