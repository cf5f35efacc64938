//! Transforms against values worked out by PyTorch or by hand, and folders of image files.

use kiln_data::{Image, Random};

fn ramp(channels: usize, height: usize, width: usize) -> Image {
    Image::new((0..channels * height * width).map(|i| i as f32).collect(), channels, height, width)
}

#[test]
fn crop_pad_and_flip_move_pixels() {
    let image = ramp(2, 2, 3);
    assert_eq!(image.crop(1, 1, 1, 2).pixels(), [4.0, 5.0, 10.0, 11.0]);
    assert_eq!(image.clone().flip().pixels()[..6], [2.0, 1.0, 0.0, 5.0, 4.0, 3.0]);
    assert_eq!(image.flip_vertical().pixels()[6..], [9.0, 10.0, 11.0, 6.0, 7.0, 8.0]);
    let padded = ramp(1, 1, 2).pad(1);
    assert_eq!((padded.height(), padded.width()), (3, 4));
    assert_eq!(padded.pixels(), [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(padded.center_crop(1, 2), ramp(1, 1, 2));
    assert_eq!(ramp(1, 5, 5).center_crop(3, 3).pixels()[..3], [6.0, 7.0, 8.0]);
    let (mut left, mut kept) = (0, 0);
    let mut random = Random::new(4);
    for _ in 0..200 {
        let crop = ramp(1, 4, 4).random_crop(2, 3, &mut random);
        assert_eq!(crop.shape(), [1, 2, 3].into());
        left += usize::from(crop.pixels()[0] % 4.0 == 0.0);
        kept += usize::from(image.clone().random_flip(&mut random) == image);
        let resized = ramp(3, 9, 7).random_resized_crop(4, 5, &mut random);
        assert_eq!(resized.shape(), [3, 4, 5].into());
    }
    assert!((70..130).contains(&left) && (70..130).contains(&kept), "{left} {kept}");
}

#[test]
fn colours_are_normalised_by_channel() {
    let image = ramp(2, 1, 2).normalize(&[0.5, 1.0], &[0.5, 2.0]);
    assert_eq!(image.pixels(), [-1.0, 1.0, 0.5, 1.0]);
    assert_eq!(ramp(2, 1, 2).gray().pixels(), [1.0, 2.0]);
    assert!((Image::new(vec![1.0, 0.5, 0.25], 3, 1, 1).gray().pixels()[0] - 0.621).abs() < 1e-6);
}

#[test]
#[should_panic(expected = "normalize: 1 means and 1 deviations for 3 channels")]
fn as_many_means_as_channels() {
    ramp(3, 1, 1).normalize(&[0.0], &[1.0]);
}

/// The pixels `i * i % 17` of 5 by 7. `resize.py` made the values.
#[test]
fn resize_agrees_with_pytorch() {
    let image = Image::new((0..35).map(|i| (i * i % 17) as f32).collect(), 1, 5, 7);
    for (height, width, want) in GOLDEN {
        let got = image.resize(*height, *width);
        let far = got.pixels().iter().zip(*want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(got.pixels().len() == want.len() && far < 1e-5, "{height} by {width}: {far}");
    }
}

type Golden = (usize, usize, &'static [f32]);

#[rustfmt::skip]
const GOLDEN: &[Golden] = &[
    (2, 3, &[
        7.623377, 8.032087, 8.116884, 8.116882, 8.032085, 7.623376,
    ]),
    (3, 10, &[
        6.428571, 6.271429, 6.571428, 7.771429, 10.271428, 11.021429, 9.900002, 8.5, 8.0, 8.0,
        11.888888, 9.138889, 6.138889, 4.038888, 5.694444, 5.694445, 4.038888, 6.138889, 9.138887, 11.888888,
        8.000001, 8.0, 8.499999, 9.899999, 11.021428, 10.27143, 7.77143, 6.571429, 6.27143, 6.428572,
    ]),
    (9, 4, &[
        0.619048, 4.800001, 12.44, 5.238095, 5.095238, 7.720001, 10.573332, 7.460317, 12.555555, 12.586669,
        7.462222, 11.164021, 10.682538, 8.12, 4.386666, 9.492063, 6.47619, 1.32, 1.32, 6.47619,
        9.492064, 4.386668, 8.120003, 10.682541, 11.164021, 7.462223, 12.586665, 12.555553, 7.460315, 10.573336,
        7.719996, 5.095233, 5.238095, 12.440001, 4.8, 0.619048,
    ]),
    (5, 13, &[
        0.0, 0.307692, 0.846154, 2.153846, 3.769231, 6.307693, 9.000002, 12.769232, 15.384613, 11.07692,
        7.076922, 3.846152, 2.0, 15.0, 14.384616, 13.307692, 13.0, 13.0, 13.923078, 14.999996,
        7.999998, 2.46154, 5.69231, 9.23077, 13.538464, 16.0, 9.0, 7.461538, 4.76923, 2.846154,
        1.230769, 0.538461, 0.0, 0.538462, 1.23077, 2.846155, 4.769231, 7.46154, 9.0, 16.0,
        13.538462, 9.230768, 5.692307, 2.461537, 8.000001, 14.999999, 13.923077, 13.0, 13.0, 13.307692,
        14.384616, 15.0, 2.0, 3.846154, 7.076924, 11.076923, 15.384617, 12.76923, 8.999999, 6.307692,
        3.76923, 2.153845, 0.846154, 0.307692, 0.0,
    ]),
    (1, 1, &[
        7.721195,
    ]),
];

#[cfg(feature = "images")]
mod folder {
    use image::{Rgb, RgbImage};
    use kiln_data::{DataError, DataLoader, Dataset, Fault, Image, ImageFolder};
    use kiln_tensor::Device;
    use std::path::{Path, PathBuf};

    fn picture(path: &Path, width: u32, height: u32, colour: [u8; 3]) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        RgbImage::from_pixel(width, height, Rgb(colour)).save(path).unwrap();
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kiln-images-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn folders_are_classes() {
        let top = folder("classes");
        picture(&top.join("dog/2.png"), 6, 4, [255, 0, 51]);
        picture(&top.join("cat/deep/1.png"), 3, 5, [0, 255, 0]);
        picture(&top.join("cat/0.jpg"), 8, 8, [128, 128, 128]);
        std::fs::write(top.join("cat/notes.txt"), "no image").unwrap();
        let set = ImageFolder::open(&top).unwrap();
        assert_eq!((set.classes(), set.len()), (&["cat".to_string(), "dog".to_string()][..], 3));
        let (image, class) = set.sample(2).unwrap();
        assert_eq!((image.shape(), class), ([3, 4, 6].into(), 1));
        assert_eq!([0, 24, 48].map(|at| image.pixels()[at]), [1.0, 0.0, 0.2]);
        assert!(set.path(1).unwrap().ends_with("cat/deep/1.png"));
        let (gray, _) = set.sample(0).unwrap();
        assert!(gray.pixels().iter().all(|pixel| (pixel - 128.0 / 255.0).abs() < 0.02));
        let loader = DataLoader::new(set).batch(3).workers(2);
        let loader = loader.transform(|(image, class), _| (image.resize(4, 4), class));
        let (x, y) = loader.on(&Device::cpu()).next().unwrap().unwrap();
        assert_eq!((x.shape(), y.to_vec::<i64>().unwrap()), ([3, 3, 4, 4].into(), vec![0, 0, 1]));
        std::fs::remove_dir_all(top).unwrap();
    }

    #[test]
    fn damaged_images_are_named() {
        let top = folder("damaged");
        picture(&top.join("a/0.png"), 4, 4, [1, 2, 3]);
        let whole = std::fs::read(top.join("a/0.png")).unwrap();
        assert!(Image::decode(&whole).is_ok());
        std::fs::write(top.join("a/1.png"), &whole[..whole.len() / 2]).unwrap();
        let set = ImageFolder::open(&top).unwrap();
        let batches: Vec<_> = DataLoader::new(set).workers(1).on(&Device::cpu()).collect();
        let error = batches[1].as_ref().unwrap_err();
        assert!(matches!(error, DataError::Sample { index: 1, .. }), "{error}");
        assert!(
            matches!(error.fault(), Some(Fault::Image { .. })) && error.to_string().contains("a/1.png"),
            "{error}"
        );
        std::fs::remove_dir_all(&top).unwrap();
        std::fs::create_dir_all(top.join("empty")).unwrap();
        assert!(matches!(ImageFolder::open(&top).unwrap_err().fault(), Some(Fault::Missing { .. })));
        std::fs::remove_dir_all(top).unwrap();
    }

    /// A header that says 30,000 by 30,000 pixels, and nothing behind it.
    #[test]
    fn sizes_are_not_believed() {
        let mut header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
        for part in [&30_000u32.to_be_bytes()[..], &30_000u32.to_be_bytes(), &[8, 2, 0, 0, 0]] {
            header.extend(part);
        }
        let mut sum = flate2::Crc::new();
        sum.update(&header[12..]);
        header.extend(sum.sum().to_be_bytes());
        let error = Image::decode(&header).unwrap_err();
        assert!(matches!(error.fault(), Some(Fault::Image { .. })), "{error}");
    }
}
