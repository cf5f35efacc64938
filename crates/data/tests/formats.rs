//! Files of every format, written here: what is read, progress, and what is said of damaged ones.

use flate2::{Compression, write::GzEncoder};
use kiln_data::{
    Characters, Cifar, Csv, CsvOptions, DataError, DataLoader, Dataset, Fault, Idx, JsonLines, Labels, Lines,
    Mnist, Progress, with_progress,
};
use kiln_tensor::{DType, Device};
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A folder that goes away with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("kiln-data-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(Vec::new(), Compression::default());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

fn idx(code: u8, extents: &[u32], content: &[u8]) -> Vec<u8> {
    let mut file = vec![0, 0, code, extents.len() as u8];
    extents.iter().for_each(|extent| file.extend(extent.to_be_bytes()));
    file.extend_from_slice(content);
    file
}

fn fault<T>(result: Result<T, DataError>) -> Fault {
    let error = result.map(|_| ()).unwrap_err();
    error.fault().unwrap_or_else(|| panic!("{error}")).clone()
}

#[test]
fn idx_holds_every_type_of_number() {
    let content: Vec<u8> = [1.5f64, -2.0].iter().flat_map(|x| x.to_be_bytes()).collect();
    let file = Idx::parse(&idx(0x0E, &[2, 1], &content)).unwrap();
    assert_eq!((file.dtype(), file.shape()), (DType::F64, [2, 1].into()));
    let rows = DataLoader::new(file.rows()).batch(2);
    let x = rows.on(&Device::cpu()).next().unwrap().unwrap();
    assert_eq!((x.shape(), x.to_vec::<f64>().unwrap()), ([2, 1].into(), vec![1.5, -2.0]));
    for (code, dtype, size) in
        [(8, DType::U8, 1), (9, DType::I8, 1), (0xB, DType::I16, 2), (0xC, DType::I32, 4)]
    {
        let mut one = vec![0; size];
        one[size - 1] = 3;
        let file = Idx::parse(&packed(&idx(code, &[1], &one))).unwrap();
        assert_eq!((file.dtype(), file.bytes()[0]), (dtype, 3));
    }
}

#[test]
fn damaged_idx_files_are_told_apart() {
    let good = idx(8, &[2, 2], &[1, 2, 3, 4]);
    assert!(Idx::parse(&good).is_ok());
    for cut in 0..good.len() {
        let fault = fault(Idx::parse(&good[..cut]));
        match cut {
            0..4 => assert!(matches!(fault, Fault::Magic { .. }), "{fault}"),
            4..12 => assert!(matches!(fault, Fault::Io { .. }), "{fault}"),
            _ => assert_eq!(fault, Fault::Length { want: 4, have: cut as u64 - 12 }),
        }
    }
    let longer = [&good[..], &[0; 9]].concat();
    assert_eq!(fault(Idx::parse(&longer)), Fault::Length { want: 4, have: 5 });
    assert!(matches!(fault(Idx::parse(&idx(7, &[1], &[1]))), Fault::Magic { .. }));
    assert!(matches!(fault(Idx::parse(&idx(8, &[1; 9], &[1]))), Fault::Magic { .. }));
    assert!(matches!(fault(Idx::parse(&idx(8, &[u32::MAX; 8], &[1]))), Fault::Extents { .. }));
    let half = &packed(&good)[..20];
    assert!(matches!(fault(Idx::parse(half)), Fault::Io { .. }));
    assert!(matches!(
        fault(Idx::open("/nowhere/at/all")),
        Fault::Io { kind: std::io::ErrorKind::NotFound, .. }
    ));
}

#[test]
fn mnist_is_read_plain_and_packed() {
    let folder = Folder::new();
    let images: Vec<u8> = (0..3 * 4).collect();
    folder.write("train-images-idx3-ubyte", &idx(8, &[3, 2, 2], &images));
    folder.write("train-labels-idx1-ubyte.gz", &packed(&idx(8, &[3], &[5, 0, 4])));
    folder.write("t10k-images.idx3-ubyte.gz", &packed(&idx(8, &[1, 2, 2], &[255; 4])));
    let path = folder.write("t10k-labels.idx1-ubyte", &idx(8, &[1], &[7]));
    let mnist = Mnist::open(&folder.0).unwrap();
    assert_eq!((mnist.train().len(), mnist.test().len(), mnist.train().labels()), (3, 1, &[5i64, 0, 4][..]));
    let (image, label) = mnist.train().sample(2).unwrap();
    assert_eq!((image.shape(), label), ([1, 2, 2].into(), 4));
    assert_eq!(image.pixels(), [8.0 / 255.0, 9.0 / 255.0, 10.0 / 255.0, 11.0 / 255.0]);
    let (x, y) = DataLoader::new(mnist.test()).on(&Device::cpu()).next().unwrap().unwrap();
    assert_eq!((x.to_vec::<f32>().unwrap(), y.to_vec::<i64>().unwrap()), (vec![1.0; 4], vec![7]));
    assert!(mnist.train().origin(2).unwrap().ends_with("train-images-idx3-ubyte"));

    folder.write("t10k-labels.idx1-ubyte", &idx(8, &[2], &[7, 8]));
    assert_eq!(fault(Mnist::open(&folder.0)), Fault::Labels { want: 1, found: 2 });
    folder.write("t10k-labels.idx1-ubyte", &idx(9, &[1], &[7]));
    assert!(matches!(fault(Mnist::open(&folder.0)), Fault::Content { found: DType::I8, .. }));
    std::fs::remove_file(path).unwrap();
    let error = Mnist::open(&folder.0).unwrap_err();
    assert!(error.to_string().contains("t10k-labels-idx1-ubyte.gz"), "{error}");
}

/// The set that examples are run with.
#[test]
fn the_small_set_is_whole() {
    let mnist = Mnist::open(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/mnist-small")).unwrap();
    assert_eq!((mnist.train().len(), mnist.test().len()), (256, 64));
    let (image, label) = mnist.train().sample(0).unwrap();
    assert_eq!((image.shape(), label), ([1, 28, 28].into(), 0));
    assert!(mnist.test().labels().iter().all(|label| (0..10).contains(label)));
}

fn record(labels: &[u8], first: u8) -> Vec<u8> {
    let mut record = labels.to_vec();
    record.extend((0..3072u32).map(|i| first.wrapping_add((i / 1024) as u8)));
    record
}

#[test]
fn cifar_is_read() {
    let folder = Folder::new();
    for part in 1..=5u8 {
        folder.write(&format!("data_batch_{part}.bin"), &[record(&[part], part), record(&[0], 0)].concat());
    }
    folder.write("test_batch.bin", &record(&[9], 100));
    let cifar = Cifar::open_10(&folder.0).unwrap();
    assert_eq!(cifar.train().labels(), [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]);
    let (image, label) = cifar.train().sample(4).unwrap();
    assert_eq!((image.shape(), label), ([3, 32, 32].into(), 3));
    assert_eq!([0, 1024, 2048].map(|at| image.pixels()[at]), [3.0, 4.0, 5.0].map(|v: f32| v / 255.0));
    assert!(cifar.train().origin(4).unwrap().starts_with("image 0 of"));
    assert!(cifar.train().origin(9).unwrap().ends_with("data_batch_5.bin"));
    assert_eq!(cifar.test().sample(0).unwrap().1, 9);

    folder.write("train.bin", &record(&[3, 77], 0));
    folder.write("test.bin", &record(&[19, 99], 0));
    let cifar = Cifar::open_100(&folder.0).unwrap();
    assert_eq!((cifar.train().labels(), cifar.test().labels()), (&[77i64][..], &[99i64][..]));

    let ten = Labels::Ten;
    assert_eq!(fault(Cifar::parse(&[1; 3072], ten)), Fault::Records { record: 3073, have: 3072 });
    let bad = [record(&[1], 0), record(&[10], 0)].concat();
    assert_eq!(fault(Cifar::parse(&bad, ten)), Fault::Label { record: 1, label: 10, classes: 10 });
}

#[test]
fn csv_fields_are_read_by_name() {
    let text = "\u{feff}x, y ,\"na\"\"me\"\r\n1, 2.5,\"a,\nb\"\r\n\r\n-3e2,NaN,é\r\n";
    for bytes in [text.as_bytes().to_vec(), packed(text.as_bytes())] {
        let table = Csv::parse(&bytes).unwrap();
        assert_eq!((table.rows(), table.columns()), (2, &["x", " y ", "na\"me"].map(String::from)[..]));
        let row = table.row(0).unwrap();
        assert_eq!((row.parse::<i64>("x").unwrap(), row.text("na\"me").unwrap()), (1, "a,\nb"));
        assert_eq!(row.numbers(["x", " y "]).unwrap(), [1.0, 2.5]);
        let row = table.sample(1).unwrap();
        assert_eq!(row.parse::<f64>("x").unwrap(), -300.0);
        let classes = table.classes("na\"me").unwrap();
        assert_eq!((classes.len(), row.class("na\"me", &classes).unwrap()), (2, 1));
        assert!(table.row(2).is_none());
    }
    let options = CsvOptions { delimiter: b';', header: false };
    let table = Csv::parse_with(b"1;2\n3;4\n", &options).unwrap();
    assert_eq!((table.rows(), table.row(1).unwrap().parse::<u8>("1").unwrap()), (2, 4));
    assert_eq!(Csv::parse(b"").unwrap().rows(), 0);
}

#[test]
fn what_is_wrong_in_a_csv_file_has_a_line() {
    let table = Csv::parse(b"a,b\n1,2\n3,oops\n").unwrap();
    let row = table.row(1).unwrap();
    let Fault::Line { line: 3, column: Some(column), .. } = fault(row.parse::<f32>("b")) else { panic!() };
    assert_eq!(column, "b");
    assert_eq!(
        row.parse::<f32>("b").unwrap_err().to_string(),
        "memory: line 3, column \"b\": invalid float literal: \"oops\""
    );
    assert!(matches!(fault(row.text("c")), Fault::Column { columns, .. } if columns == ["a", "b"]));
    assert!(matches!(fault(row.class("a", &[])), Fault::Line { line: 3, .. }));
    assert!(matches!(fault(Csv::parse(b"a,b\n1,2\n3\n")), Fault::Line { line: 3, .. }));
    assert!(matches!(fault(Csv::parse(b"a,b\n1,\xff\n")), Fault::Line { line: 2, .. }));
    // Through a loader the sample is named as well.
    let set = table.try_map(|row| Ok((row.parse::<f32>("a")?, row.parse::<i64>("b")?)));
    let error = DataLoader::new(set).batch(2).workers(1).on(&Device::cpu()).next().unwrap().unwrap_err();
    assert!(
        error.to_string().starts_with("sample 1 (line 3 of memory): memory: line 3, column \"b\""),
        "{error}"
    );
}

#[test]
fn lines_stay_on_disk_and_are_read_by_several_threads() {
    let folder = Folder::new();
    let text: String = (0..5000).map(|i| format!("line {i} {}\r\n", "x".repeat(i % 50))).collect();
    let plain = folder.write("text.txt", text.as_bytes());
    let lines = Lines::open(&plain).unwrap();
    assert_eq!((lines.len(), lines.sample(0).unwrap()), (5000, "line 0 ".to_string()));
    let loader = DataLoader::new(lines.clone()).batch(64).workers(3);
    let all: Vec<String> = loader.on(&Device::cpu()).flat_map(|batch| batch.unwrap()).collect();
    assert!(
        all.iter()
            .enumerate()
            .all(|(i, line)| line.trim_end() == format!("line {i} {}", "x".repeat(i % 50)).trim_end())
    );
    let zipped = Lines::open(folder.write("text.gz", &packed(text.as_bytes()))).unwrap();
    assert_eq!((zipped.len(), zipped.sample(4999).unwrap()), (5000, lines.sample(4999).unwrap()));
    // The file is cut while it is open: an error, not a line of something else.
    std::fs::OpenOptions::new().write(true).open(&plain).unwrap().set_len(1000).unwrap();
    assert!(matches!(fault(lines.sample(4999)), Fault::Io { kind: std::io::ErrorKind::UnexpectedEof, .. }));
    assert!(matches!(fault(Lines::open(&folder.0)), Fault::Io { .. }));
    assert!(matches!(fault(Lines::parse(b"ok\n\xff\n").unwrap().sample(1)), Fault::Line { line: 2, .. }));
    assert_eq!(Lines::parse(b"\n\nlast").unwrap().len(), 3);
}

#[test]
fn json_lines_are_values_or_errors_with_a_line() {
    #[derive(serde::Deserialize)]
    struct Point {
        x: Vec<f32>,
        class: i64,
    }
    let text = b"{\"x\": [1, 2.5], \"class\": 3}\n\n  \n{\"x\": [4, 5], \"class\": \"no\"}\n{\"x\": ";
    let points: JsonLines<Point> = JsonLines::parse(text).unwrap();
    assert_eq!(points.len(), 3);
    let point = points.sample(0).unwrap();
    assert_eq!((point.x, point.class), (vec![1.0, 2.5], 3));
    assert!(matches!(fault(points.sample(1)), Fault::Line { line: 4, .. }));
    assert!(matches!(fault(points.sample(2)), Fault::Line { line: 5, .. }));
    assert!(matches!(points.sample(3), Err(DataError::NoSample { len: 3 })));
    let values: JsonLines = JsonLines::parse(text).unwrap();
    assert_eq!(values.sample(1).unwrap()["class"], "no");
    let deep: JsonLines = JsonLines::parse(&[b'['; 100_000]).unwrap();
    assert!(matches!(fault(deep.sample(0)), Fault::Line { line: 1, .. }));
}

#[test]
fn text_becomes_windows_of_characters() {
    let folder = Folder::new();
    let text = Characters::open(folder.write("a.txt", "añb añb".as_bytes())).unwrap();
    assert_eq!((text.vocabulary().len(), text.decode(text.tokens())), (4, "añb añb".to_string()));
    assert_eq!((text.encode("ba"), text.encode("z")), (Some(vec![2, 1]), None));
    assert_eq!(text.decode(&[-1, 99, 1]), "\u{fffd}\u{fffd}a");
    let windows = text.windows(3);
    assert_eq!(windows.len(), 2);
    let (x, y) = windows.sample(1).unwrap();
    assert_eq!((text.decode(&x), text.decode(&y)), (" añ".to_string(), "añb".to_string()));
    assert_eq!((text.windows(7).len(), text.windows(6).len()), (0, 1));
    assert_eq!(fault(Characters::open(folder.write("b.txt", b"ab\xc3"))), Fault::Utf8 { at: 2 });
}

#[test]
fn progress_is_told_while_a_file_is_read() {
    let folder = Folder::new();
    let path = folder
        .write("large.csv", &b"a,b\n".iter().copied().chain(b"12,34\n".repeat(700_000)).collect::<Vec<u8>>());
    let seen: Arc<Mutex<Vec<Progress>>> = Arc::default();
    let noted = seen.clone();
    let table =
        with_progress(move |progress| noted.lock().unwrap().push(progress.clone()), || Csv::open(&path));
    assert_eq!(table.unwrap().rows(), 700_000);
    let seen = seen.lock().unwrap();
    assert!(seen.len() >= 5 && seen.windows(2).all(|pair| pair[0].done <= pair[1].done), "{seen:?}");
    let last = seen.last().unwrap();
    assert_eq!((last.done, last.total, last.finished), (4_200_004, Some(4_200_004), true));
    assert!(seen[1].to_string().ends_with("large.csv: 2 of 5 MiB"), "{}", seen[1]);
    let told = seen.len();
    drop(seen);
    Csv::open(&path).unwrap();
    assert!(told > 0, "and nothing is told outside");
}
