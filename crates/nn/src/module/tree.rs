//! A model as text: a tree of its parts, with their shapes and how many numbers they hold.

use crate::{Module, Part};
use kiln_tensor::{Shape, Tensor};
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::{Formatter, Write};

/// Where a module lies and what it is called. Its first part may lie at the same place.
type Key = (usize, String);

thread_local! {
    /// While a summary is made: what layers gave last.
    static NOTED: RefCell<Option<HashMap<Key, Shape>>> = const { RefCell::new(None) };
}

/// A layer's result, of which a summary is told, if one is being made on this thread. Layers without content have no place
/// of their own.
pub(crate) fn note<M: Module>(layer: &M, result: Tensor) -> Tensor {
    NOTED.with_borrow_mut(|noted| match noted {
        Some(noted) if size_of::<M>() > 0 => drop(noted.insert(place(layer), result.shape())),
        _ => {}
    });
    result
}

fn place(module: &dyn Module) -> Key {
    (std::ptr::from_ref(module).cast::<()>() as usize, module.kind())
}

/// The text of `module` with the shapes that its layers gave while `run` ran.
pub(super) fn summary<M: Module>(module: &M, run: impl FnOnce()) -> String {
    /// Ends the notes, also when `run` panics.
    struct End(Option<HashMap<Key, Shape>>);
    impl Drop for End {
        fn drop(&mut self) {
            NOTED.replace(self.0.take());
        }
    }
    let end = End(NOTED.replace(Some(HashMap::new())));
    run();
    let noted = NOTED.take().unwrap_or_default();
    drop(end);
    let mut text = String::new();
    let _ = write(module, &noted, &mut text);
    text
}

/// What `Display` writes for a module.
pub fn tree<M: Module>(module: &M, f: &mut Formatter<'_>) -> std::fmt::Result {
    write(module, &HashMap::new(), f)
}

/// A line: what stands on the left, numbers, and the shape of a result.
struct Row {
    left: String,
    count: String,
    shape: String,
}

fn write(module: &dyn Module, noted: &HashMap<Key, Shape>, f: &mut dyn Write) -> std::fmt::Result {
    let mut walk = Walk { noted, lines: Vec::new(), seen: HashMap::new() };
    walk.module("", module, 0, "");
    let width =
        |of: fn(&Row) -> &str| walk.lines.iter().map(|line| of(line).chars().count()).max().unwrap_or(0);
    let (left, count) = (width(|line| &line.left), width(|line| &line.count));
    for line in &walk.lines {
        let text = format!("{:left$}  {:>count$}  {}", line.left, line.count, line.shape);
        writeln!(f, "{}", text.trim_end())?;
    }
    let frozen: usize = module.distinct().iter().filter(|(_, t)| !t.is_leaf()).map(|(_, t)| t.numel()).sum();
    write!(f, "{} parameters", grouped(module.parameter_count()))?;
    if frozen > 0 { write!(f, ", {} of them frozen", grouped(frozen)) } else { Ok(()) }
}

struct Walk<'a> {
    noted: &'a HashMap<Key, Shape>,
    lines: Vec<Row>,
    /// The first path of each parameter.
    seen: HashMap<(u64, Option<u64>), String>,
}

impl Walk<'_> {
    fn module(&mut self, name: &str, module: &dyn Module, depth: usize, path: &str) {
        let (mut settings, mut inner, mut alone) = (Vec::new(), 0, false);
        module.parts(&mut |name, part| match part {
            Part::Setting(setting) => settings.push(format!("{name}={setting}")),
            // A part without a name stands for the module.
            _ if name.is_empty() => alone = true,
            Part::Module(_) | Part::Parameter(_) | Part::Buffer(_) | Part::Mode(_) => inner += 1,
        });
        // What is missing has no name.
        if module.kind().is_empty() {
            return;
        }
        let indent = "  ".repeat(depth);
        let title = if name.is_empty() { String::new() } else { format!("{name}: ") };
        if !alone {
            let settings =
                if settings.is_empty() { String::new() } else { format!("({})", settings.join(", ")) };
            let count = module.parameter_count();
            self.lines.push(Row {
                left: format!("{indent}{title}{}{settings}", module.kind()),
                count: if count == 0 { String::new() } else { grouped(count) },
                shape: self.noted.get(&place(module)).map_or(String::new(), |shape| format!("-> {shape:?}")),
            });
        }
        let depth = if alone { depth } else { depth + 1 };
        module.parts(&mut |part_name, part| {
            let own = crate::join(path, part_name);
            let shown = if alone { name } else { part_name };
            match part {
                Part::Module(inner) => self.module(shown, inner, depth, &own),
                Part::Parameter(tensor) => self.parameter(shown, tensor, depth, own),
                Part::Buffer(buffer) => self.leaf(format!("{shown}: {} buffer", buffer.get().meta()), depth),
                Part::Mode(_) | Part::Setting(_) => {}
            }
        });
    }

    fn parameter(&mut self, name: &str, tensor: &Tensor, depth: usize, path: String) {
        let note = match self.seen.get(&tensor.identity()) {
            Some(first) => format!(", tied to {first}"),
            None if !tensor.is_leaf() => ", frozen".into(),
            None => String::new(),
        };
        self.seen.entry(tensor.identity()).or_insert(path);
        self.leaf(format!("{name}: {}{note}", tensor.meta()), depth);
    }

    fn leaf(&mut self, text: String, depth: usize) {
        let left = format!("{}{text}", "  ".repeat(depth));
        self.lines.push(Row { left, count: String::new(), shape: String::new() });
    }
}

/// A number with its digits in groups of three.
fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The name of a type without its modules. Families of this crate that are told apart by how many spatial axes they have
/// are named as their aliases are: `Conv<2>` is `Conv2d`.
pub(super) fn kind_of<T: ?Sized>() -> String {
    let full = std::any::type_name::<T>();
    let mut short = String::new();
    let mut word = String::new();
    for c in full.chars() {
        match c {
            ':' => word.clear(),
            c if c.is_alphanumeric() || c == '_' => word.push(c),
            c => {
                short.push_str(&word);
                short.push(c);
                word.clear();
            }
        }
    }
    short.push_str(&word);
    if !full.starts_with("kiln_nn::") {
        return short;
    }
    let family = short.strip_suffix('>').and_then(|s| s.split_once('<'));
    match family.filter(|(_, n)| n.chars().all(|c| c.is_ascii_digit())) {
        Some((family, n)) => format!("{family}{n}d"),
        None => short,
    }
}
