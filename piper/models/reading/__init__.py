"""What several families read alike: sizes (`trunk`), rotary embedding (`rope`), experts (`routing`)."""
