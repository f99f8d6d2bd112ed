"""Names that users' programs import from SGLang's package `srt`."""
