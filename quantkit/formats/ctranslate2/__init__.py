"""CTranslate2 model folders."""
