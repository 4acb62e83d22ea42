use super::*;
use crate::checkpoint::OpenOptions;

fn model() -> Checkpoint {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny-llama-gptq");
    Checkpoint::open(&dir, &OpenOptions::default()).unwrap()
}

fn file(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

#[test]
fn windows_do_not_overlap_and_bos_takes_a_place_in_each() {
    let ids: Vec<u32> = (0..25).map(|i| i + 100).collect();
    let (_dir, path) = file("ids.json", serde_json::to_string(&ids).unwrap().as_bytes());
    let text = Text::TokenIds(path);
    let windows = Windows::new(&text, &model(), 20, Some(8), false).unwrap();
    assert_eq!((windows.tokens.as_slice(), windows.count()), (&ids[..20], 3));
    assert_eq!(windows.first(9), &ids[..8]);
    assert_eq!(windows.first(1), &ids[..8]);
    let windows = Windows::new(&text, &model(), 16, Some(8), true).unwrap();
    let expected = [[1].as_slice(), &ids[..7], &[1], &ids[7..14]].concat();
    assert_eq!(windows.tokens, expected);
    // A token alone predicts nothing.
    assert_eq!(Windows::new(&text, &model(), 25, Some(8), false).unwrap().tokens.len(), 24);
}

#[test]
fn a_window_is_no_longer_than_the_model_has_positions() {
    let windows = |window| Windows::new(&Text::Sample, &model(), 2048, window, false);
    assert_eq!(windows(None).unwrap().window, 512);
    assert_eq!(windows(Some(1024)).unwrap().window, 1024);
    assert!(matches!(windows(Some(1025)), Err(Error::Window { window: 1025, most: 1024 })));
    assert!(matches!(windows(Some(1)), Err(Error::Window { .. })));
}

#[test]
fn the_built_in_text_has_enough_tokens() {
    let windows = Windows::new(&Text::Sample, &model(), 8192, None, false).unwrap();
    assert_eq!((windows.tokens.len(), windows.name.as_str()), (8192, "built-in"));
}

#[test]
fn jsonl_and_plain_text_of_the_same_words_give_the_same_tokens() {
    let (_dir, plain) = file("a.txt", b"The first text.\n\nThe second.");
    let (_dir2, lines) =
        file("a.jsonl", b"{\"text\": \"The first text.\"}\n\n{\"text\":\"The second.\",\"n\":1}\n");
    let tokens = |path| Windows::new(&Text::File(path), &model(), 100, None, false).unwrap().tokens;
    assert_eq!(tokens(plain), tokens(lines));
}

#[test]
fn parquet_gives_its_column_of_text() {
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::writer::SerializedFileWriter;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let schema = "message m { required int32 n; required binary text (UTF8); }";
    let schema = std::sync::Arc::new(parquet::schema::parser::parse_message_type(schema).unwrap());
    let mut writer =
        SerializedFileWriter::new(File::create(&path).unwrap(), schema, Default::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<parquet::data_type::Int32Type>().write_batch(&[1, 2], None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let texts = ["The first text.", "The second."].map(ByteArray::from);
    column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    assert_eq!(read_texts(&path).unwrap(), ["The first text.", "The second."]);
    let (_dir, broken) = file("b.parquet", b"PAR1 no parquet");
    assert!(matches!(read_texts(&broken), Err(Error::Parquet { .. })));
}

#[test]
fn faults_of_texts_are_named() {
    let fault = |name: &str, bytes: &[u8]| {
        let (_dir, path) = file(name, bytes);
        Windows::new(&Text::File(path), &model(), 100, None, false).unwrap_err()
    };
    assert!(matches!(fault("a.txt", b"ab\xffcd"), Error::NotUtf8 { at: 2, .. }));
    assert!(matches!(fault("a.jsonl", b"{\"text\": \"x\"}\n{\"words\": 1}"), Error::Line { line: 2, .. }));
    assert!(matches!(fault("a.jsonl", b"{"), Error::Line { line: 1, .. }));
    assert!(matches!(fault("a.json", b"[1, 2]"), Error::UnknownKind { .. }));
    assert!(matches!(fault("a.txt", b""), Error::TooShort { found: 0, .. }));
    let ids = |bytes: &[u8]| {
        let (_dir, path) = file("a.json", bytes);
        Windows::new(&Text::TokenIds(path), &model(), 100, None, false).unwrap_err()
    };
    assert!(matches!(ids(b"[1, 1024]"), Error::TokenOutOfRange { id: 1024, position: 1, .. }));
    assert!(matches!(ids(b"[1, -1]"), Error::TokenIds { .. }));
}
