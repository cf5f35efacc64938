//! Files of every format: written and read, damaged and hostile.

use kiln_nn::{Linear, Module, Sequential};
use kiln_store::{Load, ModelFile, StoreError, TensorFile, save, save_sharded, save_with};
use kiln_tensor::{DType, Device, Tensor};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

/// A folder of one's own, gone at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kiln-store-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn cpu() -> Device {
    Device::cpu()
}

/// A tensor of every dtype that a format has.
fn all(without: &[DType]) -> BTreeMap<String, Tensor> {
    let dtypes = DType::ALL.into_iter().filter(|d| !d.is_quantised() && !without.contains(d));
    let one = |(i, dtype): (usize, DType)| {
        let tensor =
            Tensor::from_vec((0..6).map(|n| (n + i as i64) % 2).collect(), [2, 3], &cpu()).to_dtype(dtype);
        (format!("part.{dtype}"), tensor)
    };
    let mut all: BTreeMap<_, _> = dtypes.enumerate().map(one).collect();
    all.insert("empty".into(), Tensor::zeros([0, 4], &cpu()));
    all.insert("scalar".into(), Tensor::full([], 2.5, DType::F32, &cpu()));
    all
}

fn named(all: &BTreeMap<String, Tensor>) -> impl Iterator<Item = (&str, &Tensor)> {
    all.iter().map(|(name, tensor)| (name.as_str(), tensor))
}

#[track_caller]
fn same(file: &TensorFile, want: &BTreeMap<String, Tensor>) {
    assert_eq!(file.metas().map(|(name, _)| name).collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
    for (name, tensor) in want {
        let (got, want) = (file.data(name).unwrap(), tensor.to_data().unwrap());
        assert_eq!((got.meta, &got.bytes[..]), (want.meta, &want.bytes[..]), "{name}");
        let got = file.tensor(name, &cpu()).unwrap().to_data().unwrap();
        assert_eq!(&got.bytes[..], &want.bytes[..], "{name}");
    }
}

#[test]
fn what_is_written_is_read() {
    let folder = Folder::new("round");
    let words = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let path = folder.at("all.safetensors");
    save_with(&path, named(&all(&[])), &words).unwrap();
    let file = TensorFile::open(&path).unwrap();
    same(&file, &all(&[]));
    assert_eq!(*file.metadata(), words);
    let first = fs::read(&path).unwrap();
    save_with(&path, named(&all(&[])), &words).unwrap();
    assert_eq!(fs::read(&path).unwrap(), first, "equal ones have equal bytes");
    let path = folder.at("all.npz");
    save(&path, named(&all(&[DType::BF16]))).unwrap();
    same(&TensorFile::open(&path).unwrap(), &all(&[DType::BF16]));
    let one = Tensor::from_vec(vec![1.5f32, -2.0, 3.0], [3], &cpu());
    save(folder.at("one.npy"), [("one", &one)]).unwrap();
    same(&TensorFile::open(folder.at("one.npy")).unwrap(), &BTreeMap::from([("one".to_string(), one)]));
    for (name, tensors) in [("a.npz", all(&[])), ("a.npy", all(&[])), ("a.pt", all(&[]))] {
        assert!(matches!(save(folder.at(name), named(&tensors)), Err(StoreError::Unsupported { .. })));
    }
    let left: Vec<_> = fs::read_dir(&folder.0).unwrap().flatten().map(|e| e.file_name()).collect();
    assert_eq!(left.len(), 3, "{left:?}");
}

#[test]
fn a_model_in_several_files_is_one() {
    let folder = Folder::new("sharded");
    let want = all(&[]);
    let index = save_sharded(&folder.0, named(&want), 40).unwrap();
    assert!(index.ends_with("model.safetensors.index.json"));
    same(&TensorFile::open(&folder.0).unwrap(), &want);
    // The index names a file out of the folder, and one that lacks what it should have.
    let text = fs::read_to_string(&index).unwrap();
    let first = "model-00001-of";
    fs::write(&index, text.replacen(first, &format!("../{first}"), 1)).unwrap();
    assert!(matches!(TensorFile::open(&index), Err(StoreError::Damaged { .. })));
    fs::write(&index, text.replacen("\"empty\"", "\"full\"", 1)).unwrap();
    assert!(matches!(TensorFile::open(&index), Err(StoreError::Damaged { .. })));
    let small = Folder::new("unsharded");
    assert!(save_sharded(&small.0, named(&want), 1 << 20).unwrap().ends_with("model.safetensors"));
    same(&TensorFile::open(&small.0).unwrap(), &want);
    let none = Folder::new("none");
    assert!(matches!(TensorFile::open(&none.0), Err(StoreError::Unsupported { .. })));
}

#[test]
fn arrays_in_fortrans_order_and_compressed_ones_are_read() {
    let folder = Folder::new("numpy");
    let array = |order: &str, descr: &str, shape: &str, bytes: &[u8]| {
        let mut head = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
        head.push_str(&" ".repeat(117 - head.len()));
        head.push('\n');
        [b"\x93NUMPY\x01\x00", &(head.len() as u16).to_le_bytes()[..], head.as_bytes(), bytes].concat()
    };
    let bytes: Vec<u8> = [0u16, 3, 1, 4, 2, 5].iter().flat_map(|n| n.to_le_bytes()).collect();
    fs::write(folder.at("f.npy"), array("True", "<u2", "(2, 3)", &bytes)).unwrap();
    let read = TensorFile::open(folder.at("f.npy")).unwrap();
    assert_eq!(
        read.tensor("f", &cpu()).unwrap().to_dtype(DType::I64).to_vec::<i64>().unwrap(),
        [0, 1, 2, 3, 4, 5]
    );
    let big = array("False", ">f4", "(1,)", &[0; 4]);
    fs::write(folder.at("big.npy"), big).unwrap();
    let read = TensorFile::open(folder.at("big.npy")).unwrap();
    assert!(read.unsupported()["big"].contains(">f4"));
    assert!(matches!(read.data("big"), Err(StoreError::Unsupported { .. })));
    let deflated = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
    zipped(
        &folder.at("c.npz"),
        deflated,
        &[("x.npy", &array("False", "<i8", "(2,)", &[1; 16])), ("notes", b"hm")],
    );
    let read = TensorFile::open(folder.at("c.npz")).unwrap();
    assert_eq!(read.tensor("x", &cpu()).unwrap().to_vec::<i64>().unwrap(), [0x0101_0101_0101_0101; 2]);
    for (order, descr, shape) in [
        ("False", "<f4", "(99999999999,)"),
        ("False", "<f4", "(99999999999, 99999999999)"),
        ("Maybe", "<f4", "(1,)"),
        ("False", "<f4", "(-1,)"),
        ("False", "<f4", "1"),
    ] {
        fs::write(folder.at("bad.npy"), array(order, descr, shape, &[0; 4])).unwrap();
        let read = TensorFile::open(folder.at("bad.npy"));
        let refused = read.as_ref().is_ok_and(|file| file.metas().count() == 0);
        assert!(refused || matches!(read, Err(StoreError::Damaged { .. })), "{descr} {shape}");
    }
}

fn zipped(path: &Path, options: SimpleFileOptions, members: &[(&str, &[u8])]) {
    let mut writer = ZipWriter::new(fs::File::create(path).unwrap());
    for (name, bytes) in members {
        writer.start_file(*name, options).unwrap();
        writer.write_all(bytes).unwrap();
    }
    writer.finish().unwrap();
}

fn text(s: &str) -> Vec<u8> {
    [b"X", &(s.len() as u32).to_le_bytes()[..], s.as_bytes()].concat()
}

fn int(n: i32) -> Vec<u8> {
    [b"J", &n.to_le_bytes()[..]].concat()
}

fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [b"(", &items.concat()[..], b"t"].concat()
}

/// How PyTorch pickles a tensor.
fn tensor(class: &str, key: &str, offset: i32, shape: &[i32], strides: &[i32]) -> Vec<u8> {
    let ints = |all: &[i32]| tuple(&all.iter().map(|&n| int(n)).collect::<Vec<_>>());
    let class = format!("ctorch\n{class}\n").into_bytes();
    let storage = [tuple(&[text("storage"), class, text(key), text("cpu"), int(99)]), b"Q".to_vec()].concat();
    let hooks = b"ccollections\nOrderedDict\n)R".to_vec();
    let args = tuple(&[storage, int(offset), ints(shape), ints(strides), b"\x89".to_vec(), hooks]);
    [b"ctorch._utils\n_rebuild_tensor_v2\n", &args[..], b"R"].concat()
}

fn dict(items: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let items: Vec<u8> = items.iter().flat_map(|(key, value)| [text(key), value.clone()].concat()).collect();
    [b"}(", &items[..], b"u"].concat()
}

fn pickle(root: Vec<u8>) -> Vec<u8> {
    [b"\x80\x02", &root[..], b"."].concat()
}

/// A linear layer's state with a transposed weight, in a checkpoint's dict.
fn saved() -> Vec<u8> {
    let weight = tensor("FloatStorage", "0", 1, &[2, 3], &[1, 2]);
    let parameter = [
        b"ctorch._utils\n_rebuild_parameter\n",
        &tuple(&[weight, b"\x88".to_vec(), b"N".to_vec()])[..],
        b"R",
    ];
    let state = dict(&[("weight", parameter.concat()), ("bias", tensor("HalfStorage", "1", 0, &[2], &[1]))]);
    pickle(dict(&[
        ("model", state),
        ("epoch", int(3)),
        ("z", tensor("ComplexFloatStorage", "2", 0, &[1], &[1])),
    ]))
}

fn storages() -> [Vec<u8>; 3] {
    let floats = (0..7).flat_map(|n| (n as f32).to_le_bytes()).collect();
    [floats, vec![0x00, 0x3c, 0x00, 0xc0], vec![0; 8]]
}

fn check(path: &Path) {
    let file = TensorFile::open(path).unwrap();
    let shapes: Vec<String> = file.metas().map(|(name, meta)| format!("{name} {meta}")).collect();
    assert_eq!(shapes, ["model.bias f16[2]", "model.weight f32[2,3]"]);
    assert!(file.unsupported()["z"].contains("Complex"));
    assert_eq!(
        file.tensor("model.weight", &cpu()).unwrap().to_vec::<f32>().unwrap(),
        [1., 3., 5., 2., 4., 6.]
    );
    let mut model = Linear::new(3, 2, &cpu());
    let report = model.load_with(path, Load::partial().rename(r"model\.(.*)", "$1")).unwrap();
    assert!(report.is_clean() && report.loaded == 2 && report.converted.len() == 1, "{report}");
    assert_eq!(model.bias.as_ref().unwrap().to_vec::<f32>().unwrap(), [1.0, -2.0]);
}

#[test]
fn pytorchs_archives_are_read() {
    let folder = Folder::new("zip");
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let (path, [a, b, c], saved) = (folder.at("model.pt"), storages(), saved());
    let members: [(&str, &[u8]); 5] = [
        ("archive/data.pkl", &saved),
        ("archive/byteorder", b"little"),
        ("archive/data/0", &a),
        ("archive/data/1", &b),
        ("archive/data/2", &c),
    ];
    zipped(&path, stored, &members);
    check(&path);
    // Cut storages, missing ones, and tensors that reach beyond theirs.
    zipped(&path, stored, &members[..3]);
    assert!(matches!(TensorFile::open(&path), Err(StoreError::Damaged { .. })));
    for (offset, shape, strides) in [
        (0, vec![8], vec![1]),
        (6, vec![2], vec![1]),
        (-1, vec![1], vec![1]),
        (0, vec![2, 2], vec![1]),
        (0, vec![-2], vec![1]),
        (0, vec![2], vec![i32::MAX]),
        (0, vec![i32::MAX, i32::MAX, i32::MAX], vec![i32::MAX; 3]),
    ] {
        let bad = pickle(dict(&[("x", tensor("FloatStorage", "0", offset, &shape, &strides))]));
        zipped(&path, stored, &[("a/data.pkl", &bad), ("a/data/0", &a)]);
        assert!(matches!(TensorFile::open(&path), Err(StoreError::Damaged { .. })), "{offset} {shape:?}");
    }
    // One element that stands for a thousand million.
    let wide = pickle(dict(&[("x", tensor("FloatStorage", "0", 0, &[1 << 30], &[0]))]));
    zipped(&path, stored, &[("a/data.pkl", &wide), ("a/data/0", &a)]);
    assert!(TensorFile::open(&path).unwrap().unsupported()["x"].contains("repeats"));
    let other: [(&str, &[u8]); 3] = [("a/data.pkl", &saved), ("a/byteorder", b"big"), ("a/data/0", &a)];
    zipped(&path, stored, &other);
    assert!(matches!(TensorFile::open(&path), Err(StoreError::Unsupported { .. })));
}

fn legacy() -> Vec<u8> {
    let magic = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.".to_vec();
    let keys = pickle([b"](", &["0", "1", "2"].map(text).concat()[..], b"e"].concat());
    let mut bytes =
        [magic, pickle(int(1001)), pickle(dict(&[("little_endian", b"\x88".to_vec())])), saved(), keys]
            .concat();
    for (storage, count) in storages().iter().zip([7u64, 2, 1]) {
        bytes.extend(count.to_le_bytes());
        bytes.extend(storage);
    }
    bytes
}

#[test]
fn pytorchs_old_files_are_read() {
    let folder = Folder::new("legacy");
    fs::write(folder.at("old.pth"), legacy()).unwrap();
    check(&folder.at("old.pth"));
    fs::write(folder.at("other.pkl"), pickle(int(3))).unwrap();
    assert!(matches!(TensorFile::open(folder.at("other.pkl")), Err(StoreError::Unsupported { .. })));
}

/// Every file that can be read, with each byte changed and cut at each place: an error or tensors, nothing else.
#[test]
fn damaged_files_are_errors() {
    let folder = Folder::new("damaged");
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let few = BTreeMap::from([
        ("a".to_string(), Tensor::ones([2, 3], &cpu())),
        ("b".into(), Tensor::ones([2], &cpu())),
    ]);
    let mut files = vec![("old.pt", legacy())];
    for name in ["few.safetensors", "few.npz"] {
        save(folder.at(name), named(&few)).unwrap();
        files.push((name, fs::read(folder.at(name)).unwrap()));
    }
    let [a, b, c] = storages();
    zipped(
        &folder.at("new.pt"),
        stored,
        &[("a/data.pkl", &saved()), ("a/data/0", &a), ("a/data/1", &b), ("a/data/2", &c)],
    );
    files.push(("new.pt", fs::read(folder.at("new.pt")).unwrap()));
    for (name, bytes) in files {
        let path = folder.at(name);
        let read = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            let Ok(file) = TensorFile::open(&path) else { return false };
            let names: Vec<String> = file.metas().map(|(name, _)| name.to_string()).collect();
            names.iter().filter(|name| file.data(name).is_ok()).count() > 0
        };
        assert!(read(&bytes), "{name}");
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= [0x01, 0x80, 0xff][at % 3];
            read(&changed);
            // What is cut has no tensor that reaches to the end.
            fs::write(&path, &bytes[..at]).unwrap();
            let whole = TensorFile::open(&path).and_then(|file| {
                let names: Vec<String> = file.metas().map(|(name, _)| name.to_string()).collect();
                names.iter().try_for_each(|name| file.data(name).map(drop))
            });
            assert!(whole.is_err(), "{name} cut at {at}");
        }
    }
}

#[test]
fn a_model_is_saved_and_loaded() {
    let folder = Folder::new("model");
    let model = || Sequential::new().then(Linear::new(4, 3, &cpu())).then(Linear::new(3, 2, &cpu()));
    let (a, mut b) = (model(), model());
    for name in ["m.safetensors", "m.npz", "m"] {
        a.save(folder.at(name)).unwrap();
        assert_eq!(b.load(folder.at(name)).unwrap().loaded, 4);
        for ((path, a), (_, b)) in a.parameters().iter().zip(b.parameters()) {
            assert_eq!(a.to_vec::<f32>().unwrap(), b.to_vec::<f32>().unwrap(), "{path}");
        }
    }
    // Too little, too much, of another shape: nothing is changed, and the error says what.
    let mut other = Sequential::new().then(Linear::new(4, 3, &cpu())).then(Linear::new(3, 5, &cpu()));
    let before = other.state_dict();
    let error = other.load(folder.at("m")).unwrap_err();
    assert!(error.to_string().contains("1.weight: f32[5,3] here, f32[2,3] in the state"), "{error}");
    for (name, tensor) in other.state_dict() {
        assert_eq!(tensor.to_vec::<f32>().unwrap(), before[&name].to_vec::<f32>().unwrap());
    }
    let report = other.load_with(folder.at("m"), Load::partial()).unwrap();
    assert_eq!((report.loaded, report.mismatched.len()), (2, 2));
    let mut head = Linear::new(4, 3, &cpu());
    let report = head.load_with(folder.at("m"), Load::partial().rename(r"0\.(.*)", "$1")).unwrap();
    assert_eq!((report.loaded, &report.unused[..]), (2, &["1.bias".to_string(), "1.weight".into()][..]));
    let rule = head.load_with(folder.at("m"), Load::partial().rename("(", "$1")).unwrap_err();
    assert!(matches!(rule, StoreError::Rule { .. }), "{rule}");
    let both = head.load_with(folder.at("m"), Load::partial().rename(r"\d\.(.*)", "$1")).unwrap_err();
    assert!(both.to_string().contains("both become"), "{both}");
    let file = TensorFile::open(folder.at("m")).unwrap();
    let error = file.data("weight").unwrap_err().to_string();
    assert!(error.contains("no tensor named weight; there is 1.weight"), "{error}");
}

/// Changes what an archive's directory says of its members' sizes.
fn claimed(path: &Path, size: u32) {
    let mut bytes = fs::read(path).unwrap();
    let heads: Vec<usize> =
        (0..bytes.len() - 4).filter(|&at| bytes[at..].starts_with(b"PK\x01\x02")).collect();
    assert!(!heads.is_empty());
    for at in heads {
        bytes[at + 20..at + 24].copy_from_slice(&size.to_le_bytes());
        bytes[at + 24..at + 28].copy_from_slice(&size.to_le_bytes());
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_member_is_no_larger_than_its_archive() {
    let folder = Folder::new("claimed");
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let path = folder.at("x.npz");
    let size = 0xffff_ff00u32;
    let mut head = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({},), }}", size - 128);
    head.push_str(&" ".repeat(117 - head.len()));
    head.push('\n');
    let array = [b"\x93NUMPY\x01\x00", &(head.len() as u16).to_le_bytes()[..], head.as_bytes()].concat();
    zipped(&path, stored, &[("x.npy", &array)]);
    claimed(&path, size);
    assert!(matches!(TensorFile::open(&path), Err(StoreError::Damaged { .. })));
    let path = folder.at("x.pt");
    let root = pickle(dict(&[("x", tensor("ByteStorage", "0", 0, &[i32::MAX], &[1]))]));
    zipped(&path, stored, &[("a/data/0", b"few"), ("a/data.pkl", &root)]);
    claimed(&path, size);
    assert!(matches!(TensorFile::open(&path), Err(StoreError::Damaged { .. })));
}

/// How much memory this process has ever had, in bytes.
#[cfg(target_os = "linux")]
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[cfg(target_os = "linux")]
#[test]
fn a_head_of_nothing_but_numbers_takes_little_more_than_its_bytes() {
    let folder = Folder::new("numbers");
    let path = folder.at("x.safetensors");
    let zeros = "0,".repeat(16 << 20);
    let head = format!(r#"{{"x":{{"dtype":"F32","shape":[{zeros}0],"data_offsets":[0,0]}}}}"#);
    fs::write(&path, [&(head.len() as u64).to_le_bytes()[..], head.as_bytes()].concat()).unwrap();
    drop((zeros, head));
    let before = peak();
    assert!(matches!(TensorFile::open(&path), Err(StoreError::Damaged { .. })));
    assert!(peak() - before < 64 << 20, "{} MiB more", (peak() - before) >> 20);
}

#[test]
fn extents_whose_product_is_no_number_are_read_or_refused() {
    let folder = Folder::new("empty");
    let path = folder.at("x.npy");
    for shape in ["(0, 35184372088832, 35184372088832)", "(35184372088832, 35184372088832, 0)"] {
        let mut head = format!("{{'descr': '<f4', 'fortran_order': True, 'shape': {shape}, }}");
        head.push_str(&" ".repeat(117 - head.len()));
        head.push('\n');
        let array = [b"\x93NUMPY\x01\x00", &(head.len() as u16).to_le_bytes()[..], head.as_bytes()].concat();
        fs::write(&path, array).unwrap();
        let Ok(file) = TensorFile::open(&path) else { continue };
        let names: Vec<String> = file.metas().map(|(name, _)| name.to_string()).collect();
        names.iter().for_each(|name| drop(file.data(name)));
    }
}
